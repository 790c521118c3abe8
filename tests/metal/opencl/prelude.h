// Metal's words in clang's C++ for OpenCL, whose address spaces are the same four by other names. Only parsed, never
// run: a pointer that leaves its address space is an error here as in Metal, where C++ would see nothing.
#define device __global
#define constant __constant
#define threadgroup __local
#define thread __private
#pragma OPENCL EXTENSION cl_khr_fp16 : enable

typedef unsigned int uint;
typedef unsigned short ushort;
typedef unsigned char uint8_t;
typedef char int8_t;
typedef int int32_t;
typedef long int64_t;
typedef half float16_t;
struct float2 {
  float x, y;
  float2() {}
  float2(float a, float b) : x(a), y(b) {}
};
struct uint3 {
  uint x, y, z;
};
template <typename To, typename From>
To as_type(From from) {
  return __builtin_astype(from, To);
}
int min(int, int);
int max(int, int);
float min(float, float);
float max(float, float);
float abs(float);
float rint(float);
namespace precise {
float exp2(float);
float sqrt(float);
}
template <typename T> T simd_shuffle_xor(T, ushort);
template <typename T> T simd_shuffle(T, ushort);
template <typename T> T simd_sum(T);
template <typename T> T simd_max(T);
enum class mem_flags { mem_none, mem_device, mem_threadgroup };
void threadgroup_barrier(mem_flags);
