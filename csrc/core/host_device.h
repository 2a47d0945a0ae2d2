// Marks a function that runs on the host and on the device.
#pragma once

#if defined(__CUDACC__)
#define HEADGATE_HD __host__ __device__
#else
#define HEADGATE_HD
#endif
