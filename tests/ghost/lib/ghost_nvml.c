// libnvidia-ml.so.1, the management library: what torch's caching allocator asks before it maps an expandable segment,
// and what it reports when memory runs out. The GPUs have no fabric of NVLink switches, and no other processes.
//
// Names and numbers are of the NVML API Reference Manual, version 13; no wheel has its header.
#include "ghost.h"
#include <stdio.h>

enum { NVML_SUCCESS = 0, NVML_ERROR_INVALID_ARGUMENT = 2, NVML_ERROR_NOT_SUPPORTED = 3 };

static char devices[GHOST_DEVICES];  // a handle is an address

// [Initialization and Cleanup]
int nvmlInit_v2(void) { return NVML_SUCCESS; }

// [System Queries]: the version of the driver's CUDA.
int nvmlSystemGetCudaDriverVersion_v2(int *version) {
  return cudaDriverGetVersion(version) ? NVML_ERROR_NOT_SUPPORTED : NVML_SUCCESS;
}

// [Device Queries]: the place on the bus is "domain:bus:device.function" in hexadecimal digits.
int nvmlDeviceGetHandleByPciBusId_v2(const char *place, void **device) {
  unsigned domain, bus, slot;
  int count = 0;
  cudaGetDeviceCount(&count);
  if (sscanf(place, "%x:%x:%x", &domain, &bus, &slot) != 3) return NVML_ERROR_INVALID_ARGUMENT;
  for (int index = 0; index < count; index++) {
    struct cudaDeviceProp properties;
    cudaGetDeviceProperties(&properties, index);
    if (properties.pciBusID != (int)bus || properties.pciDeviceID != (int)slot) continue;
    *device = &devices[index];
    return NVML_SUCCESS;
  }
  return NVML_ERROR_INVALID_ARGUMENT;
}

int nvmlDeviceGetComputeRunningProcesses(void *device, unsigned *count, void *processes) {
  *count = 0;
  return NVML_SUCCESS;
}

// Torch asks with the state "not supported", which is the answer for GPUs without a fabric.
int nvmlDeviceGetGpuFabricInfoV(void *device, void *info) { return NVML_SUCCESS; }

// [NvLink Methods]
int nvmlDeviceGetNvLinkRemoteDeviceType(void *device, unsigned link, void *type) { return NVML_ERROR_NOT_SUPPORTED; }

int nvmlDeviceGetNvLinkRemotePciInfo_v2(void *device, unsigned link, void *place) { return NVML_ERROR_NOT_SUPPORTED; }
