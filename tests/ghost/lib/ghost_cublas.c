// libcublas.so.13: handles and their settings. Products of matrices come from tests/ghost/kernels.py; a product that
// reaches this library is an error (a stub).
#include "ghost.h"
#include <cublas_v2.h>

static char handle_address;

cublasStatus_t cublasCreate_v2(cublasHandle_t *handle) {
  *handle = (cublasHandle_t)&handle_address;
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasDestroy_v2(cublasHandle_t handle) { return CUBLAS_STATUS_SUCCESS; }

cublasStatus_t cublasSetStream_v2(cublasHandle_t handle, cudaStream_t stream) { return CUBLAS_STATUS_SUCCESS; }

cublasStatus_t cublasSetWorkspace_v2(cublasHandle_t handle, void *start, size_t size) { return CUBLAS_STATUS_SUCCESS; }

cublasStatus_t cublasSetMathMode(cublasHandle_t handle, cublasMath_t mode) { return CUBLAS_STATUS_SUCCESS; }

cublasStatus_t cublasGetMathMode(cublasHandle_t handle, cublasMath_t *mode) {
  *mode = CUBLAS_DEFAULT_MATH;
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasSetPointerMode_v2(cublasHandle_t handle, cublasPointerMode_t mode) { return CUBLAS_STATUS_SUCCESS; }

cublasStatus_t cublasGetPointerMode_v2(cublasHandle_t handle, cublasPointerMode_t *mode) {
  *mode = CUBLAS_POINTER_MODE_HOST;
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasSetSmCountTarget(cublasHandle_t handle, int count) { return CUBLAS_STATUS_SUCCESS; }

cublasStatus_t cublasGetVersion_v2(cublasHandle_t handle, int *version) {
  *version = CUBLAS_VERSION;
  return CUBLAS_STATUS_SUCCESS;
}

const char *cublasGetStatusString(cublasStatus_t status) { return "status of the ghost cuBLAS"; }
