#!/usr/bin/env bash
# Checks of the launchers, which source this file with their own name as the argument.
set -euo pipefail
program=$1

fail() {
  echo "$program: error: ${1//[[:cntrl:]]/?}" >&2 # a terminal would obey escape sequences
  exit 2
}

# whole_number NAME [LEAST]: replaces the value of a variable by a whole number; 32K is 32768, 2M is 2097152.
whole_number() {
  local -n value=$1
  [[ $value =~ ^([0-9]{1,9})([KM]?)$ ]] || fail "$1=$value is not a whole number, such as 8 or 32K"
  value=$((10#${BASH_REMATCH[1]}))
  case ${BASH_REMATCH[2]} in
    K) value=$((value << 10)) ;;
    M) value=$((value << 20)) ;;
  esac
  ((value >= ${2:-1})) || fail "$1=$value: give at least ${2:-1}"
}

# check_data ARGUMENTS: fails unless the data set DATA exists or the arguments name other data.
check_data() {
  [[ " $*" =~ " --"([a-z-]+-)?(data-path|data-args-path|hdp-loader) ]] && return
  [[ -f $DATA.idx && -f $DATA.bin ]] || fail "DATA=$DATA: there is no $DATA.idx and .bin; bytescale corpus writes them"
}

check_out() {
  mkdir -p "$OUT" 2>/dev/null && [[ -w $OUT ]] || fail "OUT=$OUT cannot be written; choose another folder"
  no_links "$OUT/nccl" "$OUT/ranks"
}

# no_links PATH...: fails if a path, or a file below it, is a link: others may have planted it in a shared folder.
no_links() {
  local link
  link=$(find "$@" -type l -print -quit 2>/dev/null || true)
  [[ -z $link ]] || fail "$link is a link, whose target would be overwritten; remove it"
}

# new_log FILE: makes an empty file; a link of this name is replaced, not followed.
new_log() {
  if ! (rm -f -- "$1" && set -o noclobber && : >"$1") 2>/dev/null; then
    fail "$1 cannot be written"
  fi
}
