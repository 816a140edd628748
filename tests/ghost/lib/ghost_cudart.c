// libcudart.so.13 without a GPU. Device memory is host memory. Copies are done by the calling thread. Streams and events
// keep the order of work that ends later (tickets of NCCL). Kernels come from Python (tests/ghost/kernels.py); a kernel
// that reaches this library has no version for the CPU, and its launch fails with its name.
//
// Sections in brackets are sections of the CUDA Runtime API documentation, version 13.
#define _GNU_SOURCE
#include "ghost.h"
#include <dlfcn.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#define DEVICE_NAME "NVIDIA H100 80GB HBM3"
#define PAGE 4096ul

typedef struct CUstream_st {
  int number, device, priority;
  GhostTicket *_Atomic last;
  struct CUstream_st *next;
} Stream;

typedef struct CUevent_st {
  GhostTicket *last;
  double seconds;
  unsigned flags;
  bool is_recorded;
} Event;

typedef enum { PINNED = 1, DEVICE, REGISTERED } Kind;

typedef struct Block {
  uintptr_t start;
  size_t size;
  Kind kind;
  int device;
  struct Block *next;
} Block;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static _Thread_local int current_device = 0;
static _Thread_local cudaError_t last_error = cudaSuccess;
static Stream default_streams[GHOST_DEVICES];
static Stream *streams = NULL;
static Block *blocks = NULL;
static size_t used_bytes[GHOST_DEVICES];
static bool is_used[GHOST_DEVICES];  // devices with a primary context of this process
static atomic_int num_streams = 0;
static atomic_long num_tickets = 0;
static FILE *trace = NULL;
static int num_devices = 1;
static size_t memory_bytes = 80ul << 30;

__attribute__((constructor)) static void read_settings(void) {
  const char *devices = getenv("GHOST_DEVICES"), *gigabytes = getenv("GHOST_GB");
  if (devices) num_devices = atoi(devices);
  if (gigabytes) memory_bytes = (size_t)(atof(gigabytes) * (1ul << 30));
  for (int device = 0; device < GHOST_DEVICES; device++) default_streams[device].device = device;
}

static cudaError_t fail(cudaError_t error) {
  last_error = error;
  return error;
}

// [Initialization]: a call that needs a context makes the primary context of the thread's current device.
static void use_device(void) { is_used[current_device] = true; }

// ---- trace and waits

double ghost_seconds(void) {
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return time.tv_sec + time.tv_nsec * 1e-9;
}

double ghost_limit(void) {
  const char *seconds = getenv("GHOST_LIMIT");
  return seconds ? atof(seconds) : 300;
}

void ghost_trace(const char *format, ...) {
  if (!trace) return;
  va_list arguments;
  va_start(arguments, format);
  pthread_mutex_lock(&lock);
  vfprintf(trace, format, arguments);
  fputc('\n', trace);
  fflush(trace);
  pthread_mutex_unlock(&lock);
  va_end(arguments);
}

void ghost_trace_to(const char *path) {
  if (trace) fclose(trace);
  trace = path && *path ? fopen(path, "w") : NULL;
}

void ghost_die(const char *format, ...) {
  va_list arguments;
  va_start(arguments, format);
  const char *rank = getenv("RANK");
  fprintf(stderr, "ghost: rank %s: ", rank ? rank : "?");
  vfprintf(stderr, format, arguments);
  fputc('\n', stderr);
  fflush(stderr);
  va_end(arguments);
  abort();
}

static bool is_done(GhostTicket *ticket) { return !ticket || atomic_load(&ticket->is_done); }

void ghost_wait(GhostTicket *ticket, const char *reason) {
  if (is_done(ticket)) return;
  double begun = ghost_seconds();
  for (useconds_t pause = 20; !is_done(ticket); pause = pause < 1000 ? pause * 2 : pause) {
    usleep(pause);
    if (ghost_seconds() - begun > ghost_limit()) ghost_die("%s waits for %s without end", reason, ticket->text);
  }
}

// ---- streams and events

// [Stream synchronization behavior]: handle 0 and the two special handles are default streams.
static Stream *stream_of(cudaStream_t handle) {
  bool is_default = handle == 0 || handle == cudaStreamLegacy || handle == cudaStreamPerThread;
  return is_default ? &default_streams[current_device] : (Stream *)handle;
}

GhostTicket *ghost_begin(cudaStream_t handle, const char *text) {
  GhostTicket *ticket = calloc(1, sizeof *ticket);
  ticket->number = atomic_fetch_add(&num_tickets, 1) + 1;
  snprintf(ticket->text, sizeof ticket->text, "%s", text);
  ticket->before = atomic_exchange(&stream_of(handle)->last, ticket);
  return ticket;
}

void ghost_end(GhostTicket *ticket) { atomic_store(&ticket->is_done, true); }

void ghost_settle(cudaStream_t handle) { ghost_wait(atomic_load(&stream_of(handle)->last), "a kernel"); }

int ghost_stream_number(cudaStream_t handle) { return stream_of(handle)->number; }

void ghost_wait_for_device(const char *reason) {
  pthread_mutex_lock(&lock);
  Stream *first = streams;  // streams are never removed
  pthread_mutex_unlock(&lock);
  for (Stream *stream = first; stream; stream = stream->next)
    if (stream->device == current_device) ghost_wait(atomic_load(&stream->last), reason);
  ghost_wait(atomic_load(&default_streams[current_device].last), reason);
}

cudaError_t cudaStreamCreateWithPriority(cudaStream_t *handle, unsigned flags, int priority) {
  use_device();
  Stream *stream = calloc(1, sizeof *stream);
  *stream = (Stream){.number = atomic_fetch_add(&num_streams, 1) + 1, .device = current_device, .priority = priority};
  pthread_mutex_lock(&lock);
  stream->next = streams;
  streams = stream;
  pthread_mutex_unlock(&lock);
  *handle = (cudaStream_t)stream;
  return cudaSuccess;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *handle, unsigned flags) {
  return cudaStreamCreateWithPriority(handle, flags, 0);
}

cudaError_t cudaStreamCreate(cudaStream_t *handle) { return cudaStreamCreateWithPriority(handle, 0, 0); }

// [Stream Management, cudaStreamDestroy]: returns at once; the work on the stream goes on.
cudaError_t cudaStreamDestroy(cudaStream_t handle) { return cudaSuccess; }

cudaError_t cudaStreamGetPriority(cudaStream_t handle, int *priority) {
  *priority = stream_of(handle)->priority;
  return cudaSuccess;
}

cudaError_t cudaStreamQuery(cudaStream_t handle) {
  return is_done(atomic_load(&stream_of(handle)->last)) ? cudaSuccess : cudaErrorNotReady;
}

// [Stream Management, cudaStreamSynchronize]: the host waits until the device has completed all work of the stream.
cudaError_t cudaStreamSynchronize(cudaStream_t handle) {
  use_device();
  Stream *stream = stream_of(handle);
  ghost_trace("HOST_WAIT stream %d", stream->number);
  ghost_wait(atomic_load(&stream->last), "cudaStreamSynchronize");
  return cudaSuccess;
}

// [Stream Management, cudaStreamWaitEvent]: later work of the stream waits for the event; the host does not.
// Later work computes in the calling thread here, so the thread waits. The replay of traces (order.py) plays the host
// that goes on.
cudaError_t cudaStreamWaitEvent(cudaStream_t handle, cudaEvent_t event, unsigned flags) {
  Stream *stream = stream_of(handle);
  GhostTicket *ticket = event->last;
  if (!ticket) return cudaSuccess;
  ghost_trace("STREAM_WAIT %d %ld", stream->number, ticket->number);
  if (atomic_load(&stream->last) != ticket) ghost_wait(ticket, "a stream");
  return cudaSuccess;
}

// [Stream Management, cudaLaunchHostFunc]: the function runs after all work of the stream before it.
cudaError_t cudaLaunchHostFunc(cudaStream_t handle, cudaHostFn_t function, void *data) {
  ghost_wait(atomic_load(&stream_of(handle)->last), "a host function");
  function(data);
  return cudaSuccess;
}

cudaError_t cudaStreamAddCallback(cudaStream_t handle, cudaStreamCallback_t callback, void *data, unsigned flags) {
  ghost_wait(atomic_load(&stream_of(handle)->last), "a callback");
  callback(handle, cudaSuccess, data);
  return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *handle, unsigned flags) {
  use_device();
  Event *event = calloc(1, sizeof *event);
  event->flags = flags;
  *handle = (cudaEvent_t)event;
  return cudaSuccess;
}

cudaError_t cudaEventCreate(cudaEvent_t *handle) { return cudaEventCreateWithFlags(handle, 0); }

cudaError_t cudaEventDestroy(cudaEvent_t event) {
  free(event);
  return cudaSuccess;
}

// [Event Management, cudaEventRecord]: captures the work of the stream at the time of the call.
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t handle) {
  event->last = atomic_load(&stream_of(handle)->last);
  event->seconds = ghost_seconds();
  event->is_recorded = true;
  return cudaSuccess;
}

cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t handle, unsigned flags) {
  return cudaEventRecord(event, handle);
}

// [Event Management, cudaEventQuery]: an event that was never recorded is complete.
cudaError_t cudaEventQuery(cudaEvent_t event) {
  use_device();
  return is_done(event->last) ? cudaSuccess : cudaErrorNotReady;
}

cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  use_device();
  ghost_trace("HOST_WAIT event %ld", event->last ? event->last->number : 0);
  ghost_wait(event->last, "cudaEventSynchronize");
  return cudaSuccess;
}

// [Event Management, cudaEventElapsedTime]: both events are recorded, complete, and have timing.
cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t start, cudaEvent_t end) {
  if (!start->is_recorded || !end->is_recorded) return fail(cudaErrorInvalidResourceHandle);
  if ((start->flags | end->flags) & cudaEventDisableTiming) return fail(cudaErrorInvalidResourceHandle);
  if (!is_done(start->last) || !is_done(end->last)) return cudaErrorNotReady;
  *milliseconds = (float)((end->seconds - start->seconds) * 1e3);
  return cudaSuccess;
}

// ---- memory

static void add_block(void *start, size_t size, Kind kind) {
  Block *block = malloc(sizeof *block);
  pthread_mutex_lock(&lock);
  *block = (Block){(uintptr_t)start, size, kind, current_device, blocks};
  blocks = block;
  if (kind == DEVICE) used_bytes[current_device] += size;
  pthread_mutex_unlock(&lock);
}

// Removes the block that starts at an address; returns its size, or 0 if there is none.
static size_t remove_block(void *start, Kind kind) {
  size_t size = 0;
  pthread_mutex_lock(&lock);
  for (Block **place = &blocks; *place; place = &(*place)->next) {
    Block *block = *place;
    if (block->start != (uintptr_t)start || block->kind != kind) continue;
    *place = block->next;
    size = block->size;
    if (kind == DEVICE) used_bytes[block->device] -= size;
    free(block);
    break;
  }
  pthread_mutex_unlock(&lock);
  return size;
}

// Copies the block that contains an address; returns whether there is one.
static bool find_block(const void *address, Block *found) {
  uintptr_t wanted = (uintptr_t)address;
  pthread_mutex_lock(&lock);
  Block *block = blocks;
  while (block && !(block->start <= wanted && wanted < block->start + block->size)) block = block->next;
  if (block) *found = *block;
  pthread_mutex_unlock(&lock);
  return block != NULL;
}

static void *map_memory(size_t size, Kind kind) {
  int flags = MAP_PRIVATE | MAP_ANONYMOUS | (kind == DEVICE ? MAP_NORESERVE : 0);
  void *start = mmap(NULL, size, PROT_READ | PROT_WRITE, flags, -1, 0);
  if (start == MAP_FAILED) return NULL;
  add_block(start, size, kind);
  return start;
}

bool ghost_has_room(size_t size) { return used_bytes[current_device] + size <= memory_bytes; }

void ghost_map(void *start, size_t size) { add_block(start, size, DEVICE); }

void ghost_unmap(void *start) { remove_block(start, DEVICE); }

// [Memory Management, cudaMalloc]: cudaErrorMemoryAllocation if the device has too little left.
cudaError_t cudaMalloc(void **start, size_t size) {
  size_t bytes = size ? size : 1;
  use_device();
  *start = ghost_has_room(bytes) ? map_memory(bytes, DEVICE) : NULL;
  ghost_trace("MALLOC %zu", size);
  return *start ? cudaSuccess : fail(cudaErrorMemoryAllocation);
}

// [Memory Management, cudaFree]: waits for the whole device before it frees, as the implicit synchronization of the
// programming guide says ("a device memory allocation" and its release).
cudaError_t cudaFree(void *start) {
  if (!start) return cudaSuccess;
  ghost_trace("DEVICE_WAIT cudaFree");
  ghost_wait_for_device("cudaFree");
  size_t size = remove_block(start, DEVICE);
  if (!size) return fail(cudaErrorInvalidValue);
  munmap(start, size);
  return cudaSuccess;
}

cudaError_t cudaMallocAsync(void **start, size_t size, cudaStream_t handle) { return cudaMalloc(start, size); }

cudaError_t cudaFreeAsync(void *start, cudaStream_t handle) {
  ghost_settle(handle);
  size_t size = remove_block(start, DEVICE);
  if (!size) return fail(cudaErrorInvalidValue);
  munmap(start, size);
  return cudaSuccess;
}

cudaError_t cudaHostAlloc(void **start, size_t size, unsigned flags) {
  use_device();
  *start = map_memory(size ? size : 1, PINNED);
  ghost_trace("HOST_MALLOC %zu", size);
  return *start ? cudaSuccess : fail(cudaErrorMemoryAllocation);
}

cudaError_t cudaFreeHost(void *start) {
  size_t size = start ? remove_block(start, PINNED) : 0;
  if (size) munmap(start, size);
  return cudaSuccess;
}

// [Memory Management, cudaHostRegister]: locks the pages of a range. A range with a page that is registered already is
// cudaErrorHostMemoryAlreadyRegistered, even if the memory was freed in between without cudaHostUnregister.
cudaError_t cudaHostRegister(void *start, size_t size, unsigned flags) {
  use_device();
  uintptr_t first = (uintptr_t)start & ~(PAGE - 1), end = ((uintptr_t)start + size + PAGE - 1) & ~(PAGE - 1);
  bool is_taken = false;
  pthread_mutex_lock(&lock);
  for (Block *block = blocks; block; block = block->next) {
    uintptr_t other = block->start & ~(PAGE - 1), other_end = (block->start + block->size + PAGE - 1) & ~(PAGE - 1);
    is_taken |= block->kind == REGISTERED && first < other_end && other < end;
  }
  pthread_mutex_unlock(&lock);
  ghost_trace("REGISTER %zu%s", size, is_taken ? " again" : "");
  if (is_taken) return fail(cudaErrorHostMemoryAlreadyRegistered);
  add_block(start, size, REGISTERED);
  return cudaSuccess;
}

cudaError_t cudaHostUnregister(void *start) {
  ghost_trace("UNREGISTER");
  return remove_block(start, REGISTERED) ? cudaSuccess : fail(cudaErrorHostMemoryNotRegistered);
}

// [Unified Addressing, cudaPointerGetAttributes]: memory that CUDA does not know is cudaMemoryTypeUnregistered.
cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *attributes, const void *address) {
  Block block;
  memset(attributes, 0, sizeof *attributes);
  attributes->hostPointer = (void *)address;
  if (!find_block(address, &block)) {
    attributes->type = cudaMemoryTypeUnregistered;
    attributes->device = -2;
    return cudaSuccess;
  }
  attributes->type = block.kind == DEVICE ? cudaMemoryTypeDevice : cudaMemoryTypeHost;
  attributes->device = block.device;
  attributes->devicePointer = (void *)address;
  if (block.kind == DEVICE) attributes->hostPointer = NULL;
  return cudaSuccess;
}

cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total) {
  use_device();
  *total = memory_bytes;
  *free_bytes = memory_bytes - used_bytes[current_device];
  return cudaSuccess;
}

// [API synchronization behavior, Memcpy]: a copy with pageable memory is not asynchronous.
cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t size, enum cudaMemcpyKind kind, cudaStream_t handle) {
  use_device();
  Block block;
  if (!find_block(to, &block)) ghost_trace("PAGEABLE_COPY %zu to the host", size);
  else if (!find_block(from, &block)) ghost_trace("PAGEABLE_COPY %zu from the host", size);
  ghost_settle(handle);
  memmove(to, from, size);
  return cudaSuccess;
}

cudaError_t cudaMemcpy(void *to, const void *from, size_t size, enum cudaMemcpyKind kind) {
  ghost_trace("HOST_WAIT stream 0");
  ghost_settle(0);
  memmove(to, from, size);
  return cudaSuccess;
}

cudaError_t cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width,
                              size_t height, enum cudaMemcpyKind kind, cudaStream_t handle) {
  ghost_settle(handle);
  for (size_t row = 0; row < height; row++) memmove((char *)to + row * to_pitch, (char *)from + row * from_pitch, width);
  return cudaSuccess;
}

cudaError_t cudaMemcpyPeerAsync(void *to, int to_device, const void *from, int from_device, size_t size,
                                cudaStream_t handle) {
  return cudaMemcpyAsync(to, from, size, cudaMemcpyDefault, handle);
}

cudaError_t cudaMemsetAsync(void *start, int value, size_t size, cudaStream_t handle) {
  ghost_settle(handle);
  memset(start, value, size);
  return cudaSuccess;
}

cudaError_t cudaMemset(void *start, int value, size_t size) { return cudaMemsetAsync(start, value, size, 0); }

// ---- devices

int ghost_device(void) { return current_device; }

void ghost_set_device(int device) { current_device = device; }

bool ghost_is_used(int device) { return device >= 0 && device < GHOST_DEVICES && is_used[device]; }

cudaError_t cudaGetDeviceCount(int *count) {
  *count = num_devices;
  return num_devices ? cudaSuccess : fail(cudaErrorNoDevice);
}

cudaError_t cudaGetDevice(int *device) {
  *device = current_device;
  return cudaSuccess;
}

// [Device Management, cudaSetDevice]: initializes the device's primary context.
cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device >= num_devices) return fail(cudaErrorInvalidDevice);
  current_device = device;
  use_device();
  return cudaSuccess;
}

cudaError_t cudaDeviceCanAccessPeer(int *can, int device, int peer) {
  *can = device != peer;
  return cudaSuccess;
}

cudaError_t cudaDeviceEnablePeerAccess(int peer, unsigned flags) { return cudaSuccess; }

cudaError_t cudaDeviceGetPCIBusId(char *text, int size, int device) {
  snprintf(text, size, "0000:%02x:00.0", device + 1);
  return cudaSuccess;
}

cudaError_t cudaDeviceGetStreamPriorityRange(int *lowest, int *highest) {
  if (lowest) *lowest = 0;
  if (highest) *highest = -5;
  return cudaSuccess;
}

// [Device Management, cudaDeviceSynchronize]: the host waits for all streams of the current device.
cudaError_t cudaDeviceSynchronize(void) {
  ghost_trace("DEVICE_WAIT cudaDeviceSynchronize");
  ghost_wait_for_device("cudaDeviceSynchronize");
  return cudaSuccess;
}

cudaError_t cudaDriverGetVersion(int *version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}

cudaError_t cudaRuntimeGetVersion(int *version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}

static void fill_properties(struct cudaDeviceProp *properties, int device) {
  *properties = (struct cudaDeviceProp){
      .name = DEVICE_NAME, .totalGlobalMem = memory_bytes, .sharedMemPerBlock = 49152, .regsPerBlock = 65536,
      .warpSize = 32, .maxThreadsPerBlock = 1024, .maxThreadsDim = {1024, 1024, 64},
      .maxGridSize = {2147483647, 65535, 65535}, .totalConstMem = 65536, .major = 9, .minor = 0,
      .textureAlignment = 512, .multiProcessorCount = 132, .canMapHostMemory = 1, .concurrentKernels = 1,
      .asyncEngineCount = 3, .unifiedAddressing = 1, .memoryBusWidth = 5120, .l2CacheSize = 50 << 20,
      .maxThreadsPerMultiProcessor = 2048, .streamPrioritiesSupported = 1, .sharedMemPerMultiprocessor = 233472,
      .regsPerMultiprocessor = 65536, .managedMemory = 1, .cooperativeLaunch = 1, .sharedMemPerBlockOptin = 232448,
      .maxBlocksPerMultiProcessor = 32, .reservedSharedMemPerBlock = 1024, .hostRegisterSupported = 1,
      .memoryPoolsSupported = 1, .clusterLaunch = 1, .pciBusID = device + 1,
  };
  properties->uuid.bytes[0] = device + 1;
}

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *properties, int device) {
  if (device < 0 || device >= num_devices) return fail(cudaErrorInvalidDevice);
  fill_properties(properties, device);
  return cudaSuccess;
}

// Figures of an H100 SXM, from the same values as cudaGetDeviceProperties; 1 for features that a Hopper GPU has.
int ghost_attribute(int attribute) {
  struct cudaDeviceProp values;
  fill_properties(&values, 0);
  switch (attribute) {
    case cudaDevAttrMaxThreadsPerBlock: return values.maxThreadsPerBlock;
    case cudaDevAttrMaxBlockDimX: case cudaDevAttrMaxBlockDimY: return values.maxThreadsDim[0];
    case cudaDevAttrMaxBlockDimZ: return values.maxThreadsDim[2];
    case cudaDevAttrMaxGridDimX: return values.maxGridSize[0];
    case cudaDevAttrMaxGridDimY: case cudaDevAttrMaxGridDimZ: return values.maxGridSize[1];
    case cudaDevAttrMaxSharedMemoryPerBlock: return (int)values.sharedMemPerBlock;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: return (int)values.sharedMemPerBlockOptin;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: return (int)values.sharedMemPerMultiprocessor;
    case cudaDevAttrReservedSharedMemoryPerBlock: return (int)values.reservedSharedMemPerBlock;
    case cudaDevAttrTotalConstantMemory: return (int)values.totalConstMem;
    case cudaDevAttrWarpSize: return values.warpSize;
    case cudaDevAttrMaxRegistersPerBlock: case cudaDevAttrMaxRegistersPerMultiprocessor: return values.regsPerBlock;
    case cudaDevAttrClockRate: return 1980000;
    case cudaDevAttrMemoryClockRate: return 2619000;
    case cudaDevAttrGlobalMemoryBusWidth: return values.memoryBusWidth;
    case cudaDevAttrMultiProcessorCount: return values.multiProcessorCount;
    case cudaDevAttrL2CacheSize: return values.l2CacheSize;
    case cudaDevAttrMaxThreadsPerMultiProcessor: return values.maxThreadsPerMultiProcessor;
    case cudaDevAttrMaxBlocksPerMultiprocessor: return values.maxBlocksPerMultiProcessor;
    case cudaDevAttrComputeCapabilityMajor: return values.major;
    case cudaDevAttrComputeCapabilityMinor: return values.minor;
    case cudaDevAttrAsyncEngineCount: return values.asyncEngineCount;
    case cudaDevAttrTextureAlignment: return (int)values.textureAlignment;
    case cudaDevAttrIntegrated: case cudaDevAttrKernelExecTimeout: case cudaDevAttrComputeMode:
    case cudaDevAttrTccDriver: case cudaDevAttrIsMultiGpuBoard: return 0;
    default: return 1;
  }
}

cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int device) {
  *value = ghost_attribute(attribute);
  return cudaSuccess;
}

static char memory_pool[64];  // only its address is used

cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t *pool, int device) {
  *pool = (cudaMemPool_t)memory_pool;
  return cudaSuccess;
}

cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t pool, enum cudaMemPoolAttr attribute, void *value) {
  *(uint64_t *)value = 0;
  return cudaSuccess;
}

cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t pool, enum cudaMemPoolAttr attribute, void *value) {
  return cudaSuccess;
}

cudaError_t cudaMemPoolSetAccess(cudaMemPool_t pool, const struct cudaMemAccessDesc *access, size_t count) {
  return cudaSuccess;
}

cudaError_t cudaMemPoolTrimTo(cudaMemPool_t pool, size_t bytes) { return cudaSuccess; }

// ---- kernels: torch's libraries register theirs when they are loaded, as code that nvcc writes does

typedef struct {
  const void *function;
  const char *name;
} KernelName;

static KernelName *kernel_names = NULL;
static size_t num_kernel_names = 0;

void **__cudaRegisterFatBinary(void *binary) {
  static void *handle[1];
  return handle;
}

void __cudaRegisterFatBinaryEnd(void **handle) {}

void __cudaUnregisterFatBinary(void **handle) {}

void __cudaRegisterFunction(void **handle, const char *function, char *device_function, const char *name, int limit,
                            void *thread, void *block, void *block_size, void *grid_size, int *warp_size) {
  pthread_mutex_lock(&lock);
  if ((num_kernel_names & (num_kernel_names - 1)) == 0) {
    size_t room = num_kernel_names ? 2 * num_kernel_names : 1;
    kernel_names = realloc(kernel_names, room * sizeof *kernel_names);
  }
  kernel_names[num_kernel_names++] = (KernelName){function, name};
  pthread_mutex_unlock(&lock);
}

void __cudaRegisterVar(void **handle, char *variable, char *address, const char *name, int is_extern, size_t size,
                       int is_constant, int is_global) {}

char __cudaInitModule(void **handle) { return 1; }

cudaError_t __cudaGetKernel(cudaKernel_t *kernel, const void *function) {
  *kernel = (cudaKernel_t)function;
  return cudaSuccess;
}

static _Thread_local struct {
  dim3 grid, block;
  size_t shared_bytes;
  struct CUstream_st *stream;
} configuration;

unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared_bytes, struct CUstream_st *stream) {
  configuration.grid = grid;
  configuration.block = block;
  configuration.shared_bytes = shared_bytes;
  configuration.stream = stream;
  return 0;
}

cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared_bytes, void *stream) {
  *grid = configuration.grid;
  *block = configuration.block;
  *shared_bytes = configuration.shared_bytes;
  *(void **)stream = configuration.stream;
  return cudaSuccess;
}

// [Error codes, cudaErrorNoKernelImageForDevice]: there is no code for this device.
static cudaError_t launch(const void *function) {
  const char *name = "a kernel of a module";
  for (size_t index = 0; index < num_kernel_names; index++)
    if (kernel_names[index].function == function) name = kernel_names[index].name;
  fprintf(stderr, "ghost: %s has no kernel for the CPU: add its operator to tests/ghost/kernels.py\n", name);
  return fail(cudaErrorNoKernelImageForDevice);
}

cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void **arguments, size_t shared_bytes,
                               cudaStream_t handle) {
  return launch((const void *)kernel);
}

cudaError_t cudaLaunchKernel(const void *function, dim3 grid, dim3 block, void **arguments, size_t shared_bytes,
                             cudaStream_t handle) {
  return launch(function);
}

cudaError_t cudaLaunchCooperativeKernel(const void *function, dim3 grid, dim3 block, void **arguments,
                                        size_t shared_bytes, cudaStream_t handle) {
  return launch(function);
}

cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *config, const void *function, void **arguments) {
  return launch(function);
}

cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *attributes, const void *function) {
  *attributes = (struct cudaFuncAttributes){.maxThreadsPerBlock = 1024, .numRegs = 32, .ptxVersion = 90,
                                            .binaryVersion = 90, .maxDynamicSharedSizeBytes = 232448};
  return cudaSuccess;
}

cudaError_t cudaFuncSetAttribute(const void *function, enum cudaFuncAttribute attribute, int value) {
  return cudaSuccess;
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *count, const void *function, int block_size,
                                                                   size_t shared_bytes, unsigned flags) {
  *count = 2;
  return cudaSuccess;
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *count, const void *function, int block_size,
                                                          size_t shared_bytes) {
  *count = 2;
  return cudaSuccess;
}

// [Driver Entry Point Access]: functions come from libcuda.so.1.
cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned version,
                                             unsigned long long flags, enum cudaDriverEntryPointQueryResult *result) {
  void *driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
  cudaError_t (*find)(const char *, void **, int, uint64_t, void *) = driver ? dlsym(driver, "cuGetProcAddress_v2") : NULL;
  *function = NULL;
  if (find) find(name, function, version, 0, NULL);
  if (result) *result = *function ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return cudaSuccess;
}

// ---- errors, graphs, profiler

// [Error Handling, cudaGetLastError]: returns the last error of the calling thread and resets it.
cudaError_t cudaGetLastError(void) {
  cudaError_t error = last_error;
  last_error = cudaSuccess;
  return error;
}

cudaError_t cudaPeekAtLastError(void) { return last_error; }

const char *cudaGetErrorName(cudaError_t error) {
  static _Thread_local char text[32];
  snprintf(text, sizeof text, "cudaError %d", error);
  return text;
}

const char *cudaGetErrorString(cudaError_t error) {
  switch (error) {
    case cudaErrorMemoryAllocation: return "out of memory";
    case cudaErrorHostMemoryAlreadyRegistered: return "part or all of the requested memory range is already mapped";
    case cudaErrorHostMemoryNotRegistered: return "pointer does not correspond to a registered memory region";
    case cudaErrorInvalidDevice: return "invalid device ordinal";
    case cudaErrorNoKernelImageForDevice: return "no kernel image is available for execution on the device";
    case cudaErrorNotSupported: return "operation not supported";
    default: return cudaGetErrorName(error);
  }
}

cudaError_t cudaProfilerStart(void) { return cudaSuccess; }

cudaError_t cudaProfilerStop(void) { return cudaSuccess; }

// No stream is ever captured: graphs are not played, and beginning a capture is an error (a stub).
cudaError_t cudaStreamIsCapturing(cudaStream_t handle, enum cudaStreamCaptureStatus *status) {
  *status = cudaStreamCaptureStatusNone;
  return cudaSuccess;
}

cudaError_t cudaStreamGetCaptureInfo(cudaStream_t handle, enum cudaStreamCaptureStatus *status, unsigned long long *id,
                                     cudaGraph_t *graph, const cudaGraphNode_t **dependencies,
                                     const cudaGraphEdgeData **edges, size_t *count) {
  *status = cudaStreamCaptureStatusNone;
  if (id) *id = 0;
  if (count) *count = 0;
  return cudaSuccess;
}

cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *mode) { return cudaSuccess; }
