// What the kernels share. The host passes it as the header of mx.fast.metal_kernel, which puts MLX's own header with
// the types and `using namespace metal` before it.

// Template values that name a codec
constant constexpr int RAW = 0;
constant constexpr int INT8 = 1;
constant constexpr int TURBO4 = 2;
constant constexpr int TURBO3 = 3;

constant constexpr int LANES = 32;
constant constexpr int SIMDS = 4;  // simdgroups of every threadgroup
constant constexpr int THREADS = LANES * SIMDS;
constant constexpr int UNIT = 8;  // dimensions of a row that one lane holds
constant constexpr float LOWEST = -1e30f;  // a floor for maxima, so that nothing visible gives zeros
constant constexpr float HALF_MAX = 65504.0f;

// How many lanes share a row of `dim` dimensions: the units of a row, rounded up to a power of two.
constexpr int lanes_of_row(int dim) {
  return dim <= 64 ? 8 : dim <= 128 ? 16 : 32;
}

// Entries of the table that decodes two codes at a time
constexpr int table_size(int codec) {
  return codec == TURBO4 ? 256 : codec == TURBO3 ? 64 : 1;
}

// A half that is not negative, by its bits: subnormal ones too, whatever the device does with them.
inline float half_value(uint bits) {
  return bits < 1024u ? float(bits) * 5.9604644775390625e-8f : as_type<float>((bits << 13) + 0x38000000u);
}

// The bits of the half nearest to x, ties to even, for 0 <= x <= HALF_MAX
inline uint half_nearest(float x) {
  uint bits = as_type<uint>(x);
  if (bits < 0x38800000u) {
    return uint(rint(x * 16777216.0f));
  }
  return (bits + 0x0fffu + ((bits >> 13) & 1u) - 0x38000000u) >> 13;
}

// The bits of the smallest half that is not below x
inline uint half_upwards(float x) {
  uint bits = half_nearest(x);
  return half_value(bits) < x ? bits + 1u : bits;
}

inline bool is_finite_bits(float x) {
  return (as_type<uint>(x) & 0x7f800000u) != 0x7f800000u;
}

// The Hadamard factor of the rotation, in place and not normalized, on a row in threadgroup memory that `STRIDE`
// threads work on. Index k * ODD + l, ODD the odd part of D: only k is transformed.
template <int D, int STRIDE>
inline void butterflies(threadgroup float* row, int worker) {
  for (int step = D / (D & -D); step < D; step *= 2) {
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (int pair = worker; pair < D / 2; pair += STRIDE) {
      int low = pair / step * 2 * step + pair % step;
      float a = row[low];
      float b = row[low + step];
      row[low] = a + b;
      row[low + step] = a - b;
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
}

// The other factor: the DCT of the odd part and the norm, which are the first ODD x ODD block of the whole matrix.
template <int D, int STRIDE, bool UNDO, typename M>
inline void odd_factor(threadgroup float* row, int worker, M matrix) {
  constexpr int ODD = D / (D & -D);
  float mixed[(D + STRIDE - 1) / STRIDE];
  int i = 0;
  for (int d = worker; d < D; d += STRIDE) {
    int j = d % ODD;
    float sum = 0.0f;
    for (int l = 0; l < ODD; l++) {
      sum += matrix[UNDO ? l * D + j : j * D + l] * row[d - j + l];
    }
    mixed[i] = sum;
    i++;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  i = 0;
  for (int d = worker; d < D; d += STRIDE) {
    row[d] = mixed[i];
    i++;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
}

// Two levels for each pair of codes. The caller sets a barrier before it is read.
template <int CODEC, typename M>
inline void fill_table(threadgroup float2* table, int worker, M levels) {
  constexpr int BITS = CODEC == TURBO4 ? 4 : 3;
  if (CODEC == TURBO4 || CODEC == TURBO3) {
    for (int i = worker; i < table_size(CODEC); i += THREADS) {
      table[i] = float2(levels[i & ((1 << BITS) - 1)], levels[i >> BITS]);
    }
  }
}
