// Words that CUDA's headers use for the compiler of device code. On the host they mean nothing.
// The wheel of the runtime has no crt/host_defines.h; this file stands in its place.
#pragma once
#define __host__
#define __device__
#define __global__
#define __device_builtin__
#define __device_builtin_texture_type__
#define __device_builtin_surface_type__
#define __cudart_builtin__
#define __align__(n) __attribute__((aligned(n)))
#define __builtin_align__(n) __attribute__((aligned(n)))
#define __location__(a)
#define __annotate__(a)
#define __specialization_static
#define __no_return__ __attribute__((noreturn))
#define __noinline__ __attribute__((noinline))
#define __forceinline__ inline
#define __thread__ __thread
#define __import__
#define __export__
#define __cdecl
#define __CUDA_ARCH_HAS_FEATURE__(x) 0
#define CUDARTAPI
#define CUDARTAPI_CDECL
#define CUDART_CB
