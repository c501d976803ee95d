// Integer types and the function qualifier shared by g++ and NVRTC.
#pragma once

#if defined(__CUDACC_RTC__)  // NVRTC has no <cstdint>
typedef signed char int8_t;
typedef short int16_t;
typedef int int32_t;
typedef long long int64_t;
typedef unsigned char uint8_t;
typedef unsigned short uint16_t;
typedef unsigned int uint32_t;
typedef unsigned long long uint64_t;
#else
#include <cstdint>
#endif

#if defined(__CUDACC__) || defined(__CUDACC_RTC__)
#define MXSIM_HD __host__ __device__ __forceinline__
#else
#define MXSIM_HD inline
#endif
