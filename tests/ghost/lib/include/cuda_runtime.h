// NCCL needs only the types of the runtime.
#pragma once
#include <cuda_runtime_api.h>
