// CUDA's headers include this file and crt/host_config.h, which come with NVIDIA's compiler only.
// For g++, which compiles the emulator, the words that mark functions mean nothing.
#pragma once

#define __host__
#define __device__
#define __global__
#define __shared__
#define __constant__
#define __managed__
#define __forceinline__ inline
#define __align__(n) __attribute__((aligned(n)))
#define __builtin_align__(n) __align__(n)
#define __device_builtin__
#define __device_builtin_texture_type__
#define __device_builtin_surface_type__
#define __cudart_builtin__
#define __grid_constant__
#define CUDARTAPI
#define CUDARTAPI_CDECL
