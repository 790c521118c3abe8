// Merges the splits of a query vector by log-sum-exp: those of pages first, whose sum is rotated back once.
//
// T the dtype of the output; D the head size; ROTATED whether the pages' V is. Grid: THREADS x vectors of all heads.
//
// sums float [vectors, splits, D]   stats float [vectors, splits, 2]   out T [vectors, D]
const int splits = dims[0];
const int page_splits = dims[1];
const int lane = thread_index_in_simdgroup;
const int simd = simdgroup_index_in_threadgroup;
const int worker = simd * LANES + lane;
const int64_t vector = threadgroup_position_in_grid.y;
const int64_t first = vector * splits;

threadgroup float page_shares[SIMDS * D];
threadgroup float raw_shares[SIMDS * D];
threadgroup float row[D];

float top = LOWEST;
for (int s = lane; s < splits; s += LANES) {
  top = max(top, stats[(first + s) * 2]);
}
top = simd_max(top);
float total = 0.0f;
for (int s = lane; s < splits; s += LANES) {
  total += stats[(first + s) * 2 + 1] * precise::exp2(stats[(first + s) * 2] - top);
}
total = simd_sum(total);

for (int d = lane; d < D; d += LANES) {
  float page_sum = 0.0f;
  for (int s = simd; s < page_splits; s += SIMDS) {
    page_sum += sums[(first + s) * D + d] * precise::exp2(stats[(first + s) * 2] - top);
  }
  float raw_sum = 0.0f;
  for (int s = page_splits + simd; s < splits; s += SIMDS) {
    raw_sum += sums[(first + s) * D + d] * precise::exp2(stats[(first + s) * 2] - top);
  }
  page_shares[simd * D + d] = page_sum;
  raw_shares[simd * D + d] = raw_sum;
}
threadgroup_barrier(mem_flags::mem_threadgroup);

for (int d = worker; d < D; d += THREADS) {
  float sum = 0.0f;
  for (int s = 0; s < SIMDS; s++) {
    sum += page_shares[s * D + d];
  }
  row[d] = sum;
}
if (ROTATED) {
  butterflies<D, THREADS>(row, worker);
  odd_factor<D, THREADS, true>(row, worker, matrix);
}
for (int d = worker; d < D; d += THREADS) {
  float sum = ROTATED ? row[d] * signs[d] : row[d];
  for (int s = 0; s < SIMDS; s++) {
    sum += raw_shares[s * D + d];
  }
  out[vector * D + d] = T(total == 0.0f ? 0.0f : sum / total);
}
