// What the ghost libraries share: streams that end later, the trace, and the limit of every wait.
#pragma once
#include <cuda_runtime_api.h>
#include <stdbool.h>

#define GHOST_DEVICES 64

// Work on a stream that ends after the call that started it: an operation of NCCL.
// Kernels and copies are done when the call returns, so they need no ticket.
typedef struct GhostTicket {
  long number;
  bool _Atomic is_done;
  struct GhostTicket *before;  // the last ticket of the stream when this one was made
  char text[160];
} GhostTicket;

// Appends work to a stream. Tickets are never freed, because events may hold them.
GhostTicket *ghost_begin(cudaStream_t stream, const char *text);
void ghost_end(GhostTicket *ticket);
// Lets the calling thread wait for a ticket; ends the process with a message after ghost_limit() seconds.
void ghost_wait(GhostTicket *ticket, const char *reason);
// Waits for everything on a stream, as work that computes in the calling thread must.
void ghost_settle(cudaStream_t stream);
int ghost_stream_number(cudaStream_t stream);  // 0 for default streams

int ghost_device(void);
void ghost_set_device(int device);
bool ghost_is_used(int device);
int ghost_attribute(int attribute);

// Adds and removes device memory that the driver maps (expandable segments of the caching allocator).
bool ghost_has_room(size_t size);
void ghost_map(void *start, size_t size);
void ghost_unmap(void *start);
void ghost_wait_for_device(const char *reason);

// Writes one line to the trace of this process, if it has one.
void ghost_trace(const char *format, ...) __attribute__((format(printf, 1, 2)));
// Starts a trace, or ends it if path is NULL or empty.
void ghost_trace_to(const char *path);

double ghost_seconds(void);
double ghost_limit(void);  // GHOST_LIMIT in seconds, 300 unless set
// Prints a message and aborts the process.
void ghost_die(const char *format, ...) __attribute__((format(printf, 1, 2), noreturn));
