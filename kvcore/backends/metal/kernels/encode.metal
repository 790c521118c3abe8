// Rows to codes and scales: rotate, quantize, pack, one simdgroup for each row.
//
// T the dtype of the rows; D the head size; CODEC one that quantizes. Grid: (THREADS * rows / SIMDS, rounded up).
//
// rows T [B, H, n, D]   codes [B, H, n, width]   scale half [B, H, n, 1]
const int heads = dims[0];
const int tokens = dims[1];
const int count = dims[2];
const int lane = thread_index_in_simdgroup;
const int simd = simdgroup_index_in_threadgroup;
const int wanted = int(threadgroup_position_in_grid.x) * SIMDS + simd;
const int index = min(wanted, count - 1);  // so that every simdgroup meets the barriers
constexpr int EACH = (D + LANES - 1) / LANES;
constexpr int BITS = CODEC == TURBO4 ? 4 : 3;

threadgroup float values[SIMDS * D];
threadgroup float* row = values + simd * D;
const int64_t at = index / tokens / heads * rows_strides[0] + index / tokens % heads * rows_strides[1] +
    index % tokens * rows_strides[2];
float x[EACH];
float largest = 0.0f;
int broken = 0;
for (int i = 0; i < EACH; i++) {
  const int d = lane + i * LANES;
  x[i] = d < D ? float(rows[at + d * rows_strides[3]]) : 0.0f;
  broken = is_finite_bits(x[i]) ? broken : 1;
  largest = max(largest, abs(x[i]));
}
broken = simd_max(broken);
largest = broken ? 0.0f : simd_max(largest);

uint scale_bits = 0u;
if (CODEC == INT8) {
  scale_bits = half_upwards(min(largest / 127.0f, HALF_MAX));
  scale_bits = scale_bits == 0u ? 0x3c00u : scale_bits;  // one, for a row of zeros
  const float divisor = half_value(scale_bits);
  for (int i = 0; i < EACH; i++) {
    const int d = lane + i * LANES;
    if (d < D) {
      row[d] = min(max(rint(x[i] / divisor), -127.0f), 127.0f);
    }
  }
} else {
  // Dividing by the largest first keeps the squares of huge and of tiny rows in range.
  const float unit = largest == 0.0f ? 1.0f : largest;
  float squares = 0.0f;
  for (int i = 0; i < EACH; i++) {
    const int d = lane + i * LANES;
    x[i] = broken ? 0.0f : x[i] / unit;
    squares += x[i] * x[i];
    if (d < D) {
      row[d] = x[i] * signs[d];
    }
  }
  const float norm = precise::sqrt(simd_sum(squares));
  butterflies<D, LANES>(row, lane);
  odd_factor<D, LANES, false>(row, lane, matrix);
  const float spread = factor[0] / (norm == 0.0f ? 1.0f : norm);
  squares = 0.0f;
  for (int d = lane; d < D; d += LANES) {
    const float z = row[d] * spread;
    int code = 0;
    for (int i = 1; i < (1 << BITS); i++) {
      code += z > (levels[i - 1] + levels[i]) * 0.5f ? 1 : 0;
    }
    squares += levels[code] * levels[code];
    row[d] = float(code);
  }
  const float length = precise::sqrt(simd_sum(squares));
  scale_bits = half_nearest(min(norm / length * largest, HALF_MAX));
}
threadgroup_barrier(mem_flags::mem_threadgroup);

if (wanted < count) {
  if (lane == 0) {
    ((device ushort*)scale)[wanted] = ushort(broken ? 0u : scale_bits);
  }
  if (CODEC == INT8) {
    device uint* words = (device uint*)codes + int64_t(wanted) * (D / 4);
    for (int w = lane; w < D / 4; w += LANES) {
      uint word = 0u;
      for (int i = 0; i < 4; i++) {
        word |= (uint(int(row[w * 4 + i])) & 255u) << (8 * i);
      }
      words[w] = broken ? 0u : word;
    }
  } else if (CODEC == TURBO4) {
    device uint* words = (device uint*)codes + int64_t(wanted) * (D / 8);
    for (int w = lane; w < D / 8; w += LANES) {
      uint word = 0u;
      for (int i = 0; i < 8; i++) {
        word |= uint(row[w * 8 + i]) << (4 * i);
      }
      words[w] = broken ? 0u : word;
    }
  } else {
    // Sixteen codes are three 16-bit words.
    device ushort* words = (device ushort*)codes + int64_t(wanted) * (D / 16 * 3);
    for (int w = lane; w < D / 16; w += LANES) {
      uint low = 0u;
      uint high = 0u;
      for (int i = 0; i < 8; i++) {
        low |= uint(row[w * 16 + i]) << (3 * i);
        high |= uint(row[w * 16 + 8 + i]) << (3 * i);
      }
      words[w * 3] = ushort(broken ? 0u : low & 0xffffu);
      words[w * 3 + 1] = ushort(broken ? 0u : (low >> 16) | ((high & 255u) << 8));
      words[w * 3 + 2] = ushort(broken ? 0u : high >> 8);
    }
  }
}
