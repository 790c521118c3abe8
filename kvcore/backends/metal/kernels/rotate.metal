// R_K q for the pages: each query vector is scaled and rotated once, by a simdgroup of its own.
//
// T the dtype of the queries; D the head size. Grid: (THREADS * vectors / SIMDS, rounded up).
//
// q T [B, Hq, rows, D]   turned float [B, Hq, rows, D]
const int heads = dims[0];
const int rows = dims[1];
const int vectors = dims[2];
const int lane = thread_index_in_simdgroup;
const int simd = simdgroup_index_in_threadgroup;
const int vector = int(threadgroup_position_in_grid.x) * SIMDS + simd;
const int read = min(vector, vectors - 1);  // so that every simdgroup meets the barriers

threadgroup float values[SIMDS * D];
threadgroup float* row = values + simd * D;
const int64_t at =
    read / rows / heads * q_strides[0] + read / rows % heads * q_strides[1] + read % rows * q_strides[2];
for (int d = lane; d < D; d += LANES) {
  row[d] = float(q[at + d * q_strides[3]]) * factor[0] * signs[d];
}
butterflies<D, LANES>(row, lane);
odd_factor<D, LANES, false>(row, lane, matrix);
if (vector < vectors) {
  for (int d = lane; d < D; d += LANES) {
    turned[int64_t(vector) * D + d] = row[d];
  }
}
