// libcuda.so.1, the driver, on top of ghost_cudart.c: what torch's lazy loader, the caching allocator's expandable
// segments and Triton ask of it. Modules load and have no code: a launch is an error.
//
// Sections in brackets are sections of the CUDA Driver API documentation, version 13.
#define _GNU_SOURCE
#include "ghost.h"
#include <cuda.h>
#include <dlfcn.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define GRANULARITY (2ul << 20)

static char contexts[GHOST_DEVICES];  // the primary context of a device is an address
static char module, function;

CUresult cuInit(unsigned flags) { return CUDA_SUCCESS; }

CUresult cuDriverGetVersion(int *version) {
  *version = CUDA_VERSION;
  return CUDA_SUCCESS;
}

CUresult cuGetErrorString(CUresult error, const char **text) {
  *text = error == CUDA_ERROR_OUT_OF_MEMORY ? "out of memory" : "not supported by the ghost driver";
  return CUDA_SUCCESS;
}

CUresult cuGetErrorName(CUresult error, const char **text) { return cuGetErrorString(error, text); }

// [Driver Entry Point Access]: a name without a version means the newest version of the function.
CUresult cuGetProcAddress_v2(const char *name, void **found, int version, cuuint64_t flags,
                             CUdriverProcAddressQueryResult *result) {
  char newer[128];
  snprintf(newer, sizeof newer, "%s_v2", name);
  *found = dlsym(RTLD_DEFAULT, newer);
  if (!*found) *found = dlsym(RTLD_DEFAULT, name);
  if (result) *result = *found ? CU_GET_PROC_ADDRESS_SUCCESS : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
  return *found ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}

// ---- devices and contexts

CUresult cuDeviceGetCount(int *count) { return (CUresult)cudaGetDeviceCount(count); }

CUresult cuDeviceGet(CUdevice *device, int index) {
  *device = index;
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetName(char *text, int size, CUdevice device) {
  struct cudaDeviceProp properties;
  CUresult result = (CUresult)cudaGetDeviceProperties(&properties, device);
  if (!result) snprintf(text, size, "%s", properties.name);
  return result;
}

CUresult cuDeviceGetUuid_v2(CUuuid *uuid, CUdevice device) {
  memset(uuid, 0, sizeof *uuid);
  uuid->bytes[0] = (char)(device + 1);
  return CUDA_SUCCESS;
}

CUresult cuDeviceTotalMem_v2(size_t *bytes, CUdevice device) {
  size_t unused;
  return (CUresult)cudaMemGetInfo(&unused, bytes);
}

CUresult cuMemGetInfo_v2(size_t *free_bytes, size_t *total) { return (CUresult)cudaMemGetInfo(free_bytes, total); }

CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
  *value = ghost_attribute(attribute);
  return CUDA_SUCCESS;
}

// [Primary Context Management]: torch asks whether a process has used a device already.
CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *is_active) {
  if (flags) *flags = 0;
  *is_active = ghost_is_used(device);
  return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
  *context = (CUcontext)&contexts[device];
  return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device) { return CUDA_SUCCESS; }

CUresult cuCtxGetCurrent(CUcontext *context) {
  *context = (CUcontext)&contexts[ghost_device()];
  return CUDA_SUCCESS;
}

CUresult cuCtxSetCurrent(CUcontext context) {
  if (context) ghost_set_device((int)((char *)context - contexts));
  return CUDA_SUCCESS;
}

CUresult cuCtxPushCurrent_v2(CUcontext context) { return cuCtxSetCurrent(context); }

CUresult cuCtxPopCurrent_v2(CUcontext *context) { return cuCtxGetCurrent(context); }

CUresult cuCtxGetDevice(CUdevice *device) {
  *device = ghost_device();
  return CUDA_SUCCESS;
}

CUresult cuCtxSynchronize(void) { return (CUresult)cudaDeviceSynchronize(); }

CUresult cuStreamSynchronize(CUstream stream) { return (CUresult)cudaStreamSynchronize(stream); }

CUresult cuStreamGetCtx(CUstream stream, CUcontext *context) { return cuCtxGetCurrent(context); }

CUresult cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus *status) {
  *status = CU_STREAM_CAPTURE_STATUS_NONE;
  return CUDA_SUCCESS;
}

// ---- modules: they load, but hold no code for a CPU

CUresult cuModuleLoadData(CUmodule *loaded, const void *image) {
  *loaded = (CUmodule)&module;
  return CUDA_SUCCESS;
}

CUresult cuModuleLoad(CUmodule *loaded, const char *file) { return cuModuleLoadData(loaded, file); }

CUresult cuModuleLoadDataEx(CUmodule *loaded, const void *image, unsigned count, CUjit_option *options, void **values) {
  return cuModuleLoadData(loaded, image);
}

CUresult cuModuleUnload(CUmodule loaded) { return CUDA_SUCCESS; }

CUresult cuModuleGetFunction(CUfunction *found, CUmodule loaded, const char *name) {
  *found = (CUfunction)&function;
  return CUDA_SUCCESS;
}

CUresult cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction of) {
  *value = attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : attribute == CU_FUNC_ATTRIBUTE_NUM_REGS ? 32 : 0;
  return CUDA_SUCCESS;
}

CUresult cuFuncSetAttribute(CUfunction of, CUfunction_attribute attribute, int value) { return CUDA_SUCCESS; }

CUresult cuFuncSetCacheConfig(CUfunction of, CUfunc_cache config) { return CUDA_SUCCESS; }

CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int *count, CUfunction of, int block_size, size_t shared_bytes) {
  *count = 2;
  return CUDA_SUCCESS;
}

// ---- memory

// [Unified Addressing, cuPointerGetAttribute]
CUresult cuPointerGetAttribute(void *value, CUpointer_attribute attribute, CUdeviceptr address) {
  struct cudaPointerAttributes attributes;
  cudaPointerGetAttributes(&attributes, (void *)address);
  if (attributes.type == cudaMemoryTypeUnregistered) return CUDA_ERROR_INVALID_VALUE;
  switch (attribute) {
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
      *(unsigned *)value = attributes.type == cudaMemoryTypeDevice ? CU_MEMORYTYPE_DEVICE : CU_MEMORYTYPE_HOST;
      return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL: *(int *)value = attributes.device; return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_DEVICE_POINTER: *(CUdeviceptr *)value = address; return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_CONTEXT: *(void **)value = &contexts[attributes.device]; return CUDA_SUCCESS;
    default: return CUDA_ERROR_NOT_SUPPORTED;
  }
}

CUresult cuMemsetD32Async(CUdeviceptr start, unsigned value, size_t count, CUstream stream) {
  ghost_settle(stream);
  for (size_t index = 0; index < count; index++) ((unsigned *)start)[index] = value;
  return CUDA_SUCCESS;
}

// [Virtual Memory Management]: addresses are reserved, memory is created and mapped into them.
CUresult cuMemAddressReserve(CUdeviceptr *start, size_t size, size_t alignment, CUdeviceptr hint, unsigned long long f) {
  int protection = PROT_READ | PROT_WRITE, flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  void *room = mmap(NULL, size + GRANULARITY, protection, flags, -1, 0);
  if (room == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
  *start = ((CUdeviceptr)room + GRANULARITY - 1) & ~(CUdeviceptr)(GRANULARITY - 1);
  return CUDA_SUCCESS;
}

CUresult cuMemAddressFree(CUdeviceptr start, size_t size) {
  munmap((void *)start, size);
  return CUDA_SUCCESS;
}

CUresult cuMemGetAllocationGranularity(size_t *size, const CUmemAllocationProp *properties,
                                       CUmemAllocationGranularity_flags option) {
  *size = GRANULARITY;
  return CUDA_SUCCESS;
}

CUresult cuMemCreate(CUmemGenericAllocationHandle *handle, size_t size, const CUmemAllocationProp *properties,
                     unsigned long long flags) {
  static atomic_ullong num_handles = 0;
  if (!ghost_has_room(size)) return CUDA_ERROR_OUT_OF_MEMORY;
  *handle = atomic_fetch_add(&num_handles, 1) + 1;
  ghost_trace("MALLOC %zu", size);
  return CUDA_SUCCESS;
}

CUresult cuMemRelease(CUmemGenericAllocationHandle handle) { return CUDA_SUCCESS; }

CUresult cuMemMap(CUdeviceptr start, size_t size, size_t offset, CUmemGenericAllocationHandle handle,
                  unsigned long long flags) {
  ghost_map((void *)start, size);
  return CUDA_SUCCESS;
}

CUresult cuMemSetAccess(CUdeviceptr start, size_t size, const CUmemAccessDesc *access, size_t count) {
  return CUDA_SUCCESS;
}

// [Virtual Memory Management, cuMemUnmap]: may synchronize; torch waits for the device before it, and so does this.
CUresult cuMemUnmap(CUdeviceptr start, size_t size) {
  ghost_trace("DEVICE_WAIT cuMemUnmap");
  ghost_wait_for_device("cuMemUnmap");
  ghost_unmap((void *)start);
  madvise((void *)start, size, MADV_DONTNEED);
  return CUDA_SUCCESS;
}
