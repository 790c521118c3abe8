// The part of the Metal Shading Language that kvcore's kernels use, in C++17 on one CPU thread. It checks logic: what
// the Metal compiler accepts and what a GPU makes of it are beyond it.
//
// Each GPU thread is a fiber. A fiber runs until a simdgroup operation or a barrier and waits there for the others, in
// an order that the schedule says. Threadgroup memory is all NaN when a threadgroup starts, with a guard zone around
// each array; buffers end (or begin) at a page that may not be touched.
#pragma once
#include <csetjmp>
#include <cmath>
#include <csignal>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <new>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

using uint = unsigned int;
using ushort = unsigned short;
using uchar = unsigned char;

template <typename To, typename From>
inline To as_type(From from) {
  static_assert(sizeof(To) == sizeof(From), "as_type between types of two sizes");
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}

namespace shim {
inline float half_to_float(uint16_t bits) {
  uint32_t sign = uint32_t(bits & 0x8000u) << 16, exponent = bits >> 10 & 31u, mantissa = bits & 1023u;
  if (exponent == 0) return as_type<float>(as_type<uint32_t>(std::ldexp(float(mantissa), -24)) | sign);
  if (exponent == 31) return as_type<float>(sign | 0x7f800000u | mantissa << 13);
  return as_type<float>(sign | (exponent + 112) << 23 | mantissa << 13);
}
inline uint16_t float_to_half(float x) {
  uint32_t bits = as_type<uint32_t>(x), sign = bits >> 16 & 0x8000u, rest = bits & 0x7fffffffu;
  if (rest > 0x7f800000u) return uint16_t(sign | 0x7e00u);
  if (rest >= 0x47800000u) return uint16_t(sign | 0x7c00u);
  if (rest < 0x38800000u) return uint16_t(sign | uint32_t(std::nearbyint(std::ldexp(as_type<float>(rest), 24))));
  return uint16_t(sign | (rest + 0xfffu + (rest >> 13 & 1u) - 0x38000000u) >> 13);
}
}  // namespace shim

struct half {
  uint16_t bits;
  half() = default;
  explicit half(float x) : bits(shim::float_to_half(x)) {}
  operator float() const { return shim::half_to_float(bits); }
};
struct bfloat {
  uint16_t bits;
  bfloat() = default;
  explicit bfloat(float x) {
    uint32_t wide = as_type<uint32_t>(x);
    bits = x != x ? 0x7fc0 : uint16_t((wide + 0x7fffu + (wide >> 16 & 1u)) >> 16);
  }
  operator float() const { return as_type<float>(uint32_t(bits) << 16); }
};
using float16_t = half;
using bfloat16_t = bfloat;
struct float2 {
  float x, y;
  float2() = default;
  float2(float a, float b) : x(a), y(b) {}
};
struct uint3 {
  uint x, y, z;
};

inline int min(int a, int b) { return a < b ? a : b; }
inline int max(int a, int b) { return a > b ? a : b; }
inline float min(float a, float b) { return std::fmin(a, b); }
inline float max(float a, float b) { return std::fmax(a, b); }
inline float abs(float x) { return std::fabs(x); }
inline float rint(float x) { return std::nearbyint(x); }
namespace precise {
inline float exp2(float x) { return std::exp2(x); }
inline float sqrt(float x) { return std::sqrt(x); }
}  // namespace precise

namespace shim {
constexpr int WIDTH = 32, MOST = 1024;
constexpr size_t STACK = 64 * 1024, ARENA = 32 * 1024, GUARD = 64, MOST_ARRAYS = 16;
enum Kind { RUNNING, DONE, AT_SIMD_BARRIER, AT_BARRIER, SHUFFLE_XOR, SHUFFLE, SIMD_SUM, SIMD_MAX };

struct Fiber {
  ucontext_t first;
  jmp_buf at;
  bool started;
  int kind, parity, index;
  unsigned char deposit[2][8];
};
struct Array {
  unsigned char* data;
  size_t bytes;
};
struct Work {
  void (*body)(void*, uint3, uint, uint);
  void* arguments;
  uint3 group;
  int threads;
};

// One of each for the library, and hidden from every other: several are loaded at a time.
static Fiber fibers[MOST];
static unsigned char* stacks;
static unsigned char arena[ARENA + (MOST_ARRAYS + 1) * GUARD];
static Array arrays[MOST_ARRAYS];
static size_t used;
static Fiber* self;
static Work work;
static jmp_buf scheduler;
static sigjmp_buf broken;
static char message[256];
static uint64_t random_state;

[[noreturn]] static void fail(const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(message, sizeof message, format, arguments);
  va_end(arguments);
  siglongjmp(broken, 1);
}

static void wait(int kind) {
  self->kind = kind;
  if (_setjmp(self->at) == 0) _longjmp(scheduler, 1);
}

static void entry() {
  Fiber* me = self;
  work.body(work.arguments, work.group, uint(me->index % WIDTH), uint(me->index / WIDTH));
  self->kind = DONE;
  _longjmp(scheduler, 1);
}

static void resume(Fiber& fiber) {
  self = &fiber;
  if (_setjmp(scheduler) != 0) return;
  if (fiber.started) _longjmp(fiber.at, 1);
  fiber.started = true;
  getcontext(&fiber.first);
  fiber.first.uc_stack.ss_sp = stacks + STACK * fiber.index;
  fiber.first.uc_stack.ss_size = STACK;
  fiber.first.uc_link = nullptr;
  makecontext(&fiber.first, entry, 0);
  setcontext(&fiber.first);
}

// Every lane leaves a value, waits for the other 31, and may then read theirs. Two places in turn: no lane can be two
// operations ahead of another.
template <typename T>
inline int deposit(T value, int kind) {
  static_assert(sizeof(T) <= 8, "a simdgroup operation on more than 8 bytes");
  int place = self->parity ^= 1;
  std::memcpy(self->deposit[place], &value, sizeof value);
  wait(kind);
  return place;
}
template <typename T>
inline T value_of(int lane, int place) {
  T value;
  std::memcpy(&value, (self - self->index % WIDTH + lane)->deposit[place], sizeof value);
  return value;
}

static uint64_t draw() {
  random_state ^= random_state << 13;
  random_state ^= random_state >> 7;
  return random_state ^= random_state << 17;
}

static void order(int* out, int count, int schedule) {
  for (int i = 0; i < count; i++) out[i] = schedule == 1 ? count - 1 - i : i;
  if (schedule == 2) {
    for (int i = count - 1; i > 0; i--) {
      int j = int(draw() % uint64_t(i + 1)), kept = out[i];
      out[i] = out[j];
      out[j] = kept;
    }
  }
}

// Runs the lanes of one simdgroup to their next operation. False where that is a barrier of the threadgroup or the end.
static bool advance(Fiber* simdgroup, int schedule) {
  int lanes[WIDTH];
  order(lanes, WIDTH, schedule);
  for (int lane : lanes) resume(simdgroup[lane]);
  for (int lane = 1; lane < WIDTH; lane++) {
    if (simdgroup[lane].kind != simdgroup[0].kind) {
      fail("lanes 0 and %d of simdgroup %d are at different operations", lane, simdgroup->index / WIDTH);
    }
  }
  return simdgroup->kind != DONE && simdgroup->kind != AT_BARRIER;
}

static void run_threadgroup(int schedule) {
  std::memset(arena, 0xff, sizeof arena);
  std::memset(arrays, 0, sizeof arrays);
  used = GUARD;
  for (int i = 0; i < work.threads; i++) {
    fibers[i].started = false;
    fibers[i].parity = 0;
    fibers[i].index = i;
  }
  int count = work.threads / WIDTH, ready[MOST / WIDTH], open = count;
  order(ready, count, schedule);
  while (true) {
    while (open > 0) {
      // The random schedule changes the simdgroup at each operation; the others stay with one as long as it can run.
      int turn = schedule == 2 ? int(draw() % uint64_t(open)) : 0;
      if (!advance(fibers + ready[turn] * WIDTH, schedule)) {
        for (open--; turn < open; turn++) ready[turn] = ready[turn + 1];
      }
    }
    for (int i = 1; i < count; i++) {
      if (fibers[i * WIDTH].kind != fibers[0].kind) fail("simdgroup %d ended, another waits at a barrier", i);
    }
    if (fibers[0].kind == DONE) break;
    order(ready, count, schedule);
    open = count;
  }
  for (size_t i = 0, at = 0; at < used; i++) {
    size_t stop = i < MOST_ARRAYS && arrays[i].data ? size_t(arrays[i].data - arena) : used;
    for (; at < stop; at++) {
      if (arena[at] != 0xff) fail("a write between the arrays in threadgroup memory");
    }
    if (i >= MOST_ARRAYS || !arrays[i].data) break;
    at = stop + arrays[i].bytes;
  }
}

// The array that declaration number `index` of a kernel stands for; declarations are met in the order of their numbers.
template <typename T, int N>
inline T* threadgroup_array(int index) {
  Array& array = arrays[index];
  if (array.data == nullptr) {
    size_t bytes = (sizeof(T) * N + 15) / 16 * 16;
    if (used + bytes + GUARD > sizeof arena) fail("more than 32 KiB of threadgroup memory");
    array = {arena + used, bytes};
    used += bytes + GUARD;
  }
  return reinterpret_cast<T*>(array.data);
}

static void on_signal(int number) {
  std::snprintf(message, sizeof message, number == SIGILL ? "undefined behaviour, such as a misaligned word"
                                                           : "an access outside of a buffer");
  siglongjmp(broken, 1);
}

static int run(void (*body)(void*, uint3, uint, uint), void* arguments, const uint* grid, const uint* threadgroup,
               int schedule, uint64_t seed, char* out) {
  static unsigned char own_stack[64 * 1024];
  stack_t alternative = {}, stack_before;
  alternative.ss_sp = own_stack;
  alternative.ss_size = sizeof own_stack;
  struct sigaction action = {}, before[3];
  action.sa_handler = on_signal;
  action.sa_flags = SA_ONSTACK | SA_NODEFER;
  const int signals[3] = {SIGSEGV, SIGBUS, SIGILL};
  sigaltstack(&alternative, &stack_before);
  for (int i = 0; i < 3; i++) sigaction(signals[i], &action, &before[i]);
  if (stacks == nullptr) {
    void* area = mmap(nullptr, STACK * MOST, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    stacks = static_cast<unsigned char*>(area);
  }
  random_state = seed * 2654435761u + 88172645463325252ull;
  message[0] = 0;
  volatile int failed = 0;
  if (sigsetjmp(broken, 1) == 0) {
    int threads = int(threadgroup[0] * threadgroup[1] * threadgroup[2]);
    if (threads % WIDTH || threads > MOST) fail("a threadgroup of %d threads", threads);
    for (int i = 0; i < 3; i++) {
      if (grid[i] % threadgroup[i]) fail("a grid of %u is no multiple of a threadgroup of %u", grid[i], threadgroup[i]);
    }
    uint x = grid[0] / threadgroup[0], y = grid[1] / threadgroup[1], z = grid[2] / threadgroup[2], all = x * y * z;
    for (uint i = 0; i < all; i++) {
      uint at = schedule == 1 ? all - 1 - i : i;
      work = {body, arguments, {at % x, at / x % y, at / x / y}, threads};
      run_threadgroup(schedule);
    }
  } else {
    failed = 1;
  }
  for (int i = 0; i < 3; i++) sigaction(signals[i], &before[i], nullptr);
  sigaltstack(&stack_before, nullptr);
  std::memcpy(out, message, sizeof message);
  return failed;
}
}  // namespace shim

template <typename T>
inline T simd_shuffle_xor(T value, ushort mask) {
  int place = shim::deposit(value, shim::SHUFFLE_XOR);
  return shim::value_of<T>((shim::self->index % shim::WIDTH) ^ mask, place);
}
template <typename T>
inline T simd_shuffle(T value, ushort lane) {
  if (lane >= shim::WIDTH) shim::fail("simd_shuffle from lane %d", int(lane));
  int place = shim::deposit(value, shim::SHUFFLE);
  return shim::value_of<T>(lane, place);
}
template <typename T>
inline T simd_sum(T value) {
  int place = shim::deposit(value, shim::SIMD_SUM);
  T sum = T(0);
  for (int lane = 0; lane < shim::WIDTH; lane++) sum += shim::value_of<T>(lane, place);
  return sum;
}
template <typename T>
inline T simd_max(T value) {
  int place = shim::deposit(value, shim::SIMD_MAX);
  T most = shim::value_of<T>(0, place);
  for (int lane = 1; lane < shim::WIDTH; lane++) most = max(most, shim::value_of<T>(lane, place));
  return most;
}

enum class mem_flags { mem_none, mem_device, mem_threadgroup };
inline void threadgroup_barrier(mem_flags) { shim::wait(shim::AT_BARRIER); }
inline void simdgroup_barrier(mem_flags) { shim::wait(shim::AT_SIMD_BARRIER); }

// Address spaces, after every header that may use these words
#define device
#define constant
#define thread
#define threadgroup
