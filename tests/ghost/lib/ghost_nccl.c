// libnccl.so.2 between the processes of one machine, with NCCL's order:
//
//   [Creating a Communicator]       the host waits until all ranks have called ncclCommInitRank
//   [CUDA Stream Semantics]         an operation is enqueued on a stream, and the call returns at once
//   [Using multiple NCCL communicators concurrently]   operations of one communicator run one after another, in the order
//                                   in which the rank has enqueued them
//   [Group Calls]                   operations between ncclGroupStart and ncclGroupEnd are one operation of each
//                                   communicator; its sends and receives progress together
//   [Point-to-point communication]  a send and its receive are blocking for the device until both are there: nothing is
//                                   buffered
//   [Collective Operations]         ranks that differ in the operation, the type or the count: undefined behaviour at
//                                   NVIDIA, an error with both calls here
//
// Sections in brackets are sections of the NCCL User Guide, version 2.29. Each communicator has a thread, which plays the
// operations of this rank. Peers meet in shared memory, and read each other's buffers with process_vm_readv.
#define _GNU_SOURCE
#include "ghost.h"
#include <nccl.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/uio.h>
#include <unistd.h>

#define MAX_RANKS 16
#define KEY_SIZE 48
#define HOLLOW_BYTES (1 << 18)

typedef enum { SEND, RECV, ALL_REDUCE, REDUCE, BROADCAST, ALL_GATHER, REDUCE_SCATTER, ALL_TO_ALL } Kind;

static const char *const KIND_NAMES[] = {"send", "recv", "all_reduce", "reduce", "broadcast", "all_gather",
                                         "reduce_scatter", "all_to_all"};
static const size_t TYPE_SIZES[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};  // in the order of ncclDataType_t

// A message from one rank to another. The sender fills it and raises `posted`; the receiver reads and raises `done`.
typedef struct {
  atomic_long posted, done;
  int process;
  const void *address;
  size_t bytes;
} Message;

// What a rank brings to a collective. All ranks raise `posted`, then read each other, then raise `read`.
typedef struct {
  atomic_long posted, read;
  int process, kind, type, reduction, root;
  const void *address;
  size_t count;
} Contribution;

typedef struct {
  atomic_int joined;
  int devices[MAX_RANKS];
  Contribution contributions[MAX_RANKS];
  Message messages[MAX_RANKS][MAX_RANKS];  // [from][to]
} Shared;

typedef struct Operation {
  int kind, type, reduction, peer;  // `peer` is the root of a rooted collective
  const void *from;
  void *to;
  size_t count;
  long number;  // of a message between two ranks
  bool is_posted, is_done;
  struct Operation *next;
} Operation;

// Operations that are enqueued together: the operations of a group on one communicator.
typedef struct Batch {
  Operation *first, **end;
  GhostTicket *ticket;
  struct Batch *next;
} Batch;

struct ncclComm {
  int rank, num_ranks, device;
  char key[KEY_SIZE], name[128];
  Shared *shared;
  long num_sent[MAX_RANKS], num_received[MAX_RANKS], num_collectives, num_batches;
  pthread_t thread;
  pthread_mutex_t lock;
  pthread_cond_t has_work;
  Batch *first, **end;
  bool is_closing;
  atomic_bool is_aborted;
  Batch *open;  // of the group that is being made
  cudaStream_t stream;
  struct ncclComm *next_open;
};

static _Thread_local int group_depth = 0;
static _Thread_local struct ncclComm *open_communicators = NULL;

// ---- waiting for peers

typedef struct {
  double begun;
  useconds_t pause;
} Patience;

// Sleeps a moment. Ends the process if the wait has no end; returns false if the communicator was aborted.
static bool wait_more(struct ncclComm *comm, Patience *patience, const char *reason) {
  if (!patience->begun) *patience = (Patience){ghost_seconds(), 5};
  if (atomic_load(&comm->is_aborted)) return false;
  if (ghost_seconds() - patience->begun > ghost_limit())
    ghost_die("rank %d of %s: %s without end", comm->rank, comm->name, reason);
  usleep(patience->pause);
  if (patience->pause < 500) patience->pause *= 2;
  return true;
}

static void read_peer(int process, const void *from, void *to, size_t size) {
  if (process == getpid()) {
    memmove(to, from, size);
    return;
  }
  for (size_t done = 0; done < size;) {
    struct iovec here = {(char *)to + done, size - done}, there = {(char *)from + done, size - done};
    ssize_t got = process_vm_readv(process, &here, 1, &there, 1, 0);
    if (got <= 0) ghost_die("cannot read %zu bytes of process %d: %s", size, process, strerror(errno));
    done += got;
  }
}

// ---- arithmetic of reductions: each addition is rounded to the type, rank 0 first

static float from_bfloat16(uint16_t value) {
  uint32_t bits = (uint32_t)value << 16;
  float result;
  memcpy(&result, &bits, 4);
  return result;
}

static uint16_t to_bfloat16(float value) {
  uint32_t bits;
  memcpy(&bits, &value, 4);
  if ((bits & 0x7fffffff) > 0x7f800000) return (bits >> 16) | 64;  // not a number
  return (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
}

static float from_float16(uint16_t value) {
  _Float16 result;
  memcpy(&result, &value, 2);
  return (float)result;
}

static uint16_t to_float16(float value) {
  _Float16 half = (_Float16)value;
  uint16_t result;
  memcpy(&result, &half, 2);
  return result;
}

#define REDUCED(a, b) \
  (reduction == ncclProd ? (a) * (b) : reduction == ncclMax ? ((a) > (b) ? (a) : (b)) \
   : reduction == ncclMin ? ((a) < (b) ? (a) : (b)) : (a) + (b))
#define REDUCE_AS(TYPE) \
  for (size_t i = 0; i < count; i++) ((TYPE *)total)[i] = REDUCED(((TYPE *)total)[i], ((TYPE *)part)[i])
#define REDUCE_HALF(LOAD, STORE) \
  for (size_t i = 0; i < count; i++) \
    ((uint16_t *)total)[i] = STORE(REDUCED(LOAD(((uint16_t *)total)[i]), LOAD(((uint16_t *)part)[i])))

static void reduce(void *total, const void *part, size_t count, int type, int reduction) {
  switch (type) {
    case ncclInt8: REDUCE_AS(int8_t); break;
    case ncclUint8: REDUCE_AS(uint8_t); break;
    case ncclInt32: REDUCE_AS(int32_t); break;
    case ncclUint32: REDUCE_AS(uint32_t); break;
    case ncclInt64: REDUCE_AS(int64_t); break;
    case ncclUint64: REDUCE_AS(uint64_t); break;
    case ncclFloat32: REDUCE_AS(float); break;
    case ncclFloat64: REDUCE_AS(double); break;
    case ncclFloat16: REDUCE_HALF(from_float16, to_float16); break;
    case ncclBfloat16: REDUCE_HALF(from_bfloat16, to_bfloat16); break;
    default: ghost_die("a reduction of type %d is not played", type);
  }
}

static void divide(void *total, size_t count, int type, int divisor) {
  for (size_t i = 0; i < count; i++) switch (type) {
    case ncclFloat32: ((float *)total)[i] /= divisor; break;
    case ncclFloat64: ((double *)total)[i] /= divisor; break;
    case ncclFloat16: ((uint16_t *)total)[i] = to_float16(from_float16(((uint16_t *)total)[i]) / divisor); break;
    case ncclBfloat16: ((uint16_t *)total)[i] = to_bfloat16(from_bfloat16(((uint16_t *)total)[i]) / divisor); break;
    default: ghost_die("an average of type %d is not played", type);
  }
}

// ---- collectives

static bool meet(struct ncclComm *comm, Operation *operation, long number) {
  Contribution *mine = &comm->shared->contributions[comm->rank];
  mine->process = getpid();
  mine->kind = operation->kind;
  mine->type = operation->type;
  mine->reduction = operation->reduction;
  mine->root = operation->peer;
  mine->address = operation->from;
  mine->count = operation->count;
  atomic_store(&mine->posted, number);
  for (int rank = 0; rank < comm->num_ranks; rank++) {
    Contribution *other = &comm->shared->contributions[rank];
    char reason[160];
    snprintf(reason, sizeof reason, "collective %ld, %s of %zu, waits for rank %d", number, KIND_NAMES[operation->kind],
             operation->count, rank);
    for (Patience patience = {0}; atomic_load(&other->posted) < number;)
      if (!wait_more(comm, &patience, reason)) return false;
    if (other->kind != mine->kind || other->type != mine->type || other->count != mine->count ||
        other->root != mine->root || other->reduction != mine->reduction)
      ghost_die("collective %ld of %s is %s of %zu (type %d, reduction %d, root %d) on rank %d and %s of %zu (type %d, "
                "reduction %d, root %d) on rank %d", number, comm->name, KIND_NAMES[mine->kind], mine->count, mine->type,
                mine->reduction, mine->root, comm->rank, KIND_NAMES[other->kind], other->count, other->type,
                other->reduction, other->root, rank);
  }
  return true;
}

// Whether only the order of a message matters (hollow.py): its bytes would take memory of this machine.
static bool is_hollow(size_t bytes) {
  const char *setting = getenv("GHOST_HOLLOW");
  return setting && atoi(setting) && bytes > HOLLOW_BYTES;
}

// Returns the result of a collective in new memory, or NULL if this rank has none; `size` is set to its bytes.
static char *result_of(struct ncclComm *comm, Operation *operation, size_t *size) {
  Contribution *all = comm->shared->contributions;
  size_t part = operation->count * TYPE_SIZES[operation->type];
  *size = 0;
  if (is_hollow(part)) return NULL;
  char *result = malloc(part * comm->num_ranks + 1), *other = malloc(part + 1);
  *size = part;
  switch (operation->kind) {
    case REDUCE: case ALL_REDUCE: case REDUCE_SCATTER: {
      size_t offset = operation->kind == REDUCE_SCATTER ? comm->rank * part : 0;
      if (operation->kind == REDUCE && operation->peer != comm->rank) { *size = 0; break; }
      for (int rank = 0; rank < comm->num_ranks; rank++) {
        read_peer(all[rank].process, (char *)all[rank].address + offset, rank ? other : result, part);
        if (rank) reduce(result, other, operation->count, operation->type, operation->reduction);
      }
      if (operation->reduction == ncclAvg) divide(result, operation->count, operation->type, comm->num_ranks);
      break;
    }
    case ALL_GATHER: case ALL_TO_ALL:
      *size = part * comm->num_ranks;
      for (int rank = 0; rank < comm->num_ranks; rank++) {
        size_t offset = operation->kind == ALL_TO_ALL ? comm->rank * part : 0;
        read_peer(all[rank].process, (char *)all[rank].address + offset, result + rank * part, part);
      }
      break;
    case BROADCAST:
      read_peer(all[operation->peer].process, all[operation->peer].address, result, part);
      break;
  }
  free(other);
  return result;
}

static void run_collective(struct ncclComm *comm, Operation *operation) {
  long number = ++comm->num_collectives;
  if (!meet(comm, operation, number)) return;
  size_t size;
  char *result = result_of(comm, operation, &size);
  atomic_store(&comm->shared->contributions[comm->rank].read, number);
  char reason[96];
  for (int rank = 0; rank < comm->num_ranks; rank++) {  // inputs may be outputs, so nobody writes before all have read
    snprintf(reason, sizeof reason, "the end of collective %ld waits for rank %d", number, rank);
    for (Patience patience = {0}; atomic_load(&comm->shared->contributions[rank].read) < number;)
      if (!wait_more(comm, &patience, reason)) break;
  }
  if (size && !atomic_load(&comm->is_aborted)) memcpy(operation->to, result, size);
  free(result);
}

// ---- sends and receives

// Does what it can for one message; returns whether it is done.
static bool progress(struct ncclComm *comm, Operation *operation) {
  size_t bytes = operation->count * TYPE_SIZES[operation->type];
  if (operation->kind == SEND) {
    Message *message = &comm->shared->messages[comm->rank][operation->peer];
    if (!operation->is_posted && atomic_load(&message->done) == operation->number - 1) {
      message->process = getpid();
      message->address = operation->from;
      message->bytes = bytes;
      atomic_store(&message->posted, operation->number);
      operation->is_posted = true;
    }
    return atomic_load(&message->done) >= operation->number;
  }
  Message *message = &comm->shared->messages[operation->peer][comm->rank];
  if (atomic_load(&message->posted) < operation->number || atomic_load(&message->done) < operation->number - 1) return false;
  if (message->bytes != bytes)
    ghost_die("receive %ld of %s from rank %d has %zu bytes, its send %zu", operation->number, comm->name,
              operation->peer, bytes, message->bytes);
  if (!is_hollow(bytes)) read_peer(message->process, message->address, operation->to, bytes);
  atomic_store(&message->done, operation->number);
  return true;
}

// Runs sends and receives from `first` up to `end` together.
static void run_messages(struct ncclComm *comm, Operation *first, Operation *end) {
  for (Operation *operation = first; operation != end; operation = operation->next)
    operation->number = operation->kind == SEND ? ++comm->num_sent[operation->peer] : ++comm->num_received[operation->peer];
  for (Patience patience = {0};;) {
    Operation *waiting = NULL;
    for (Operation *operation = first; operation != end; operation = operation->next) {
      if (!operation->is_done) operation->is_done = progress(comm, operation);
      if (!operation->is_done && !waiting) waiting = operation;
    }
    if (!waiting) return;
    char reason[96];
    snprintf(reason, sizeof reason, "%s %ld of %zu elements waits for rank %d", KIND_NAMES[waiting->kind],
             waiting->number, waiting->count, waiting->peer);
    if (!wait_more(comm, &patience, reason)) return;
  }
}

// ---- the thread of a communicator

static void run_batch(struct ncclComm *comm, Batch *batch) {
  ghost_wait(batch->ticket->before, "an operation of NCCL");  // the stream's order
  for (Operation *operation = batch->first; operation && !atomic_load(&comm->is_aborted);) {
    if (operation->kind > RECV) {
      run_collective(comm, operation);
      operation = operation->next;
      continue;
    }
    Operation *end = operation;
    while (end && end->kind <= RECV) end = end->next;
    run_messages(comm, operation, end);
    operation = end;
  }
  ghost_end(batch->ticket);
  for (Operation *operation = batch->first, *next; operation; operation = next) {
    next = operation->next;
    free(operation);
  }
  free(batch);
}

static void *run_batches(void *argument) {
  struct ncclComm *comm = argument;
  ghost_set_device(comm->device);
  for (;;) {
    pthread_mutex_lock(&comm->lock);
    while (!comm->first && !comm->is_closing) pthread_cond_wait(&comm->has_work, &comm->lock);
    Batch *batch = comm->first;
    if (batch && !(comm->first = batch->next)) comm->end = &comm->first;
    pthread_mutex_unlock(&comm->lock);
    if (!batch) return NULL;
    run_batch(comm, batch);
  }
}

// ---- enqueuing

static void enqueue_batch(struct ncclComm *comm) {
  Batch *batch = comm->open;
  comm->open = NULL;
  char operations[512], *place = operations, *last = operations + sizeof operations - 48;
  for (Operation *one = batch->first; one && place < last; one = one->next)
    place += sprintf(place, " %s:%d:%zu", KIND_NAMES[one->kind], one->peer, one->count * TYPE_SIZES[one->type]);
  char text[160];
  snprintf(text, sizeof text, "operation %ld of %s:%.100s", ++comm->num_batches, comm->name, operations);
  batch->ticket = ghost_begin(comm->stream, text);
  int stream = ghost_stream_number(comm->stream);
  ghost_trace("POST %ld %s %d %d %d%s", batch->ticket->number, comm->key, stream, comm->rank, comm->num_ranks, operations);
  GhostTicket *ticket = batch->ticket;  // the thread frees the batch
  pthread_mutex_lock(&comm->lock);
  *comm->end = batch;
  comm->end = &batch->next;
  pthread_cond_signal(&comm->has_work);
  pthread_mutex_unlock(&comm->lock);
  // Kernels on the default stream compute in the calling thread, so that thread waits for what is before them.
  if (stream == 0) ghost_wait(ticket, "the default stream");
}

ncclResult_t ncclGroupStart(void) {
  group_depth++;
  return ncclSuccess;
}

ncclResult_t ncclGroupEnd(void) {
  if (!group_depth) return ncclInvalidUsage;
  if (--group_depth) return ncclSuccess;
  while (open_communicators) {
    struct ncclComm *comm = open_communicators;
    open_communicators = comm->next_open;
    enqueue_batch(comm);
  }
  return ncclSuccess;
}

static ncclResult_t enqueue(struct ncclComm *comm, Operation wanted, cudaStream_t stream) {
  bool has_peer = wanted.kind <= RECV || wanted.kind == BROADCAST || wanted.kind == REDUCE;
  if (wanted.type < 0 || wanted.type > ncclBfloat16) return ncclInvalidArgument;
  if (has_peer && (wanted.peer < 0 || wanted.peer >= comm->num_ranks)) return ncclInvalidArgument;
  ncclGroupStart();
  if (!comm->open) {
    comm->open = calloc(1, sizeof *comm->open);
    comm->open->end = &comm->open->first;
    comm->stream = stream;
    comm->next_open = open_communicators;
    open_communicators = comm;
  }
  Operation *operation = malloc(sizeof *operation);
  *operation = wanted;
  *comm->open->end = operation;
  comm->open->end = &operation->next;
  return ncclGroupEnd();
}

#define OPERATION(...) enqueue(comm, (Operation){__VA_ARGS__}, stream)

ncclResult_t ncclSend(const void *from, size_t count, ncclDataType_t type, int peer, ncclComm_t comm, cudaStream_t stream) {
  return OPERATION(.kind = SEND, .from = from, .count = count, .type = type, .peer = peer);
}

ncclResult_t ncclRecv(void *to, size_t count, ncclDataType_t type, int peer, ncclComm_t comm, cudaStream_t stream) {
  return OPERATION(.kind = RECV, .to = to, .count = count, .type = type, .peer = peer);
}

ncclResult_t ncclAllReduce(const void *from, void *to, size_t count, ncclDataType_t type, ncclRedOp_t reduction,
                           ncclComm_t comm, cudaStream_t stream) {
  return OPERATION(.kind = ALL_REDUCE, .from = from, .to = to, .count = count, .type = type, .reduction = reduction);
}

ncclResult_t ncclReduce(const void *from, void *to, size_t count, ncclDataType_t type, ncclRedOp_t reduction, int root,
                        ncclComm_t comm, cudaStream_t stream) {
  return OPERATION(.kind = REDUCE, .from = from, .to = to, .count = count, .type = type, .reduction = reduction,
                   .peer = root);
}

ncclResult_t ncclBroadcast(const void *from, void *to, size_t count, ncclDataType_t type, int root, ncclComm_t comm,
                           cudaStream_t stream) {
  return OPERATION(.kind = BROADCAST, .from = from, .to = to, .count = count, .type = type, .peer = root);
}

ncclResult_t ncclBcast(void *buffer, size_t count, ncclDataType_t type, int root, ncclComm_t comm, cudaStream_t stream) {
  return ncclBroadcast(buffer, buffer, count, type, root, comm, stream);
}

ncclResult_t ncclAllGather(const void *from, void *to, size_t count, ncclDataType_t type, ncclComm_t comm,
                           cudaStream_t stream) {
  return OPERATION(.kind = ALL_GATHER, .from = from, .to = to, .count = count, .type = type);
}

ncclResult_t ncclReduceScatter(const void *from, void *to, size_t count, ncclDataType_t type, ncclRedOp_t reduction,
                               ncclComm_t comm, cudaStream_t stream) {
  return OPERATION(.kind = REDUCE_SCATTER, .from = from, .to = to, .count = count, .type = type, .reduction = reduction);
}

ncclResult_t ncclAlltoAll(const void *from, void *to, size_t count, ncclDataType_t type, ncclComm_t comm,
                          cudaStream_t stream) {
  return OPERATION(.kind = ALL_TO_ALL, .from = from, .to = to, .count = count, .type = type);
}

// ---- communicators

ncclResult_t ncclGetUniqueId(ncclUniqueId *id) {
  static atomic_int count = 0;
  memset(id, 0, sizeof *id);
  snprintf(id->internal, KEY_SIZE, "%d.%d.%ld", getpid(), atomic_fetch_add(&count, 1), (long)(ghost_seconds() * 1e6));
  return ncclSuccess;
}

// [Creating a Communicator]: blocks until all ranks have called. Each rank needs a device of its own.
static ncclResult_t join(ncclComm_t *joined, int num_ranks, const char *key, int rank, const ncclConfig_t *config) {
  if (num_ranks > MAX_RANKS || rank < 0 || rank >= num_ranks) return ncclInvalidArgument;
  struct ncclComm *comm = calloc(1, sizeof *comm);
  comm->rank = rank;
  comm->num_ranks = num_ranks;
  comm->device = ghost_device();
  comm->end = &comm->first;
  snprintf(comm->key, sizeof comm->key, "%s", key);
  snprintf(comm->name, sizeof comm->name, "%.60s (%s, %d ranks)", config && config->commName ? config->commName : "group",
           comm->key, num_ranks);
  ghost_trace("INIT %s %d %d", comm->key, rank, num_ranks);
  prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY, 0, 0, 0);  // peers read this process
  char path[KEY_SIZE + 8];
  snprintf(path, sizeof path, "/ghost.%s", comm->key);
  int file = shm_open(path, O_RDWR | O_CREAT, 0600);
  if (file < 0 || ftruncate(file, sizeof(Shared))) return ncclSystemError;
  comm->shared = mmap(NULL, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  if (comm->shared == MAP_FAILED) return ncclSystemError;
  comm->shared->devices[rank] = comm->device;
  atomic_fetch_add(&comm->shared->joined, 1);
  for (Patience patience = {0}; atomic_load(&comm->shared->joined) < num_ranks;)
    wait_more(comm, &patience, "its creation waits for other ranks");
  shm_unlink(path);
  for (int peer = 0; peer < num_ranks; peer++)  // all ranks are processes of one node
    if (peer != rank && comm->shared->devices[peer] == comm->device) {
      fprintf(stderr, "ghost: ranks %d and %d of %s share GPU %d\n", rank, peer, comm->name, comm->device);
      return ncclInvalidUsage;
    }
  pthread_mutex_init(&comm->lock, NULL);
  pthread_cond_init(&comm->has_work, NULL);
  pthread_create(&comm->thread, NULL, run_batches, comm);
  *joined = comm;
  return ncclSuccess;
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t *comm, int num_ranks, ncclUniqueId id, int rank, ncclConfig_t *config) {
  return join(comm, num_ranks, id.internal, rank, config);
}

ncclResult_t ncclCommInitRank(ncclComm_t *comm, int num_ranks, ncclUniqueId id, int rank) {
  return join(comm, num_ranks, id.internal, rank, NULL);
}

ncclResult_t ncclCommInitRankScalable(ncclComm_t *comm, int num_ranks, int rank, int num_ids, ncclUniqueId *ids,
                                      ncclConfig_t *config) {
  return join(comm, num_ranks, ids->internal, rank, config);
}

// [ncclCommDestroy]: operations that are enqueued still run. The memory stays, because torch may ask for errors later.
ncclResult_t ncclCommDestroy(ncclComm_t comm) {
  pthread_mutex_lock(&comm->lock);
  bool was_closing = comm->is_closing;
  comm->is_closing = true;
  pthread_cond_signal(&comm->has_work);
  pthread_mutex_unlock(&comm->lock);
  if (!was_closing) pthread_join(comm->thread, NULL);
  return ncclSuccess;
}

ncclResult_t ncclCommFinalize(ncclComm_t comm) { return ncclSuccess; }

// [ncclCommAbort]: ends operations that wait for peers, then frees the communicator.
ncclResult_t ncclCommAbort(ncclComm_t comm) {
  atomic_store(&comm->is_aborted, true);
  return ncclCommDestroy(comm);
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t *error) {
  *error = ncclSuccess;
  return ncclSuccess;
}

ncclResult_t ncclCommCount(const ncclComm_t comm, int *count) {
  *count = comm->num_ranks;
  return ncclSuccess;
}

ncclResult_t ncclCommCuDevice(const ncclComm_t comm, int *device) {
  *device = comm->device;
  return ncclSuccess;
}

ncclResult_t ncclCommUserRank(const ncclComm_t comm, int *rank) {
  *rank = comm->rank;
  return ncclSuccess;
}

ncclResult_t ncclCommRegister(const ncclComm_t comm, void *buffer, size_t size, void **handle) {
  *handle = buffer;
  return ncclSuccess;
}

ncclResult_t ncclCommDeregister(const ncclComm_t comm, void *handle) { return ncclSuccess; }

ncclResult_t ncclGetVersion(int *version) {
  *version = NCCL_VERSION_CODE;
  return ncclSuccess;
}

const char *ncclGetErrorString(ncclResult_t result) {
  static _Thread_local char text[40];
  snprintf(text, sizeof text, "ghost NCCL: result %d", result);
  return text;
}

const char *ncclGetLastError(ncclComm_t comm) { return ""; }
