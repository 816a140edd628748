"""Files below mirror the files of ``megatron.core`` that they change or extend."""
