// libcublasLt.so.13: only its handle. Products of matrices come from tests/ghost/kernels.py.
#include "ghost.h"
#include <cublasLt.h>

static char handle_address;

cublasStatus_t cublasLtCreate(cublasLtHandle_t *handle) {
  *handle = (cublasLtHandle_t)&handle_address;
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtDestroy(cublasLtHandle_t handle) { return CUBLAS_STATUS_SUCCESS; }

size_t cublasLtGetVersion(void) { return CUBLAS_VERSION; }
