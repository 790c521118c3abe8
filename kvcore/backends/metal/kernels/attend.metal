// Attention of one split of the rows: partial sums, maxima and normalizers, which combine.metal merges.
//
// T the dtype of queries, R of raw rows; D the head size; K_CODEC, V_CODEC of the pages; CENTRED whether their keys
// are; N query vectors at a time.
// Grid: THREADS x splits x (sequences * KV heads * chunks of N vectors). Splits of pages come first.
//
// q         T [B, Hq, rows, D]              turned    float [B, Hkv, vectors, D]: R_K q, scaled (turbo keys only)
// k_codes, v_codes [B, Hkv, folded, width]  k_scale, v_scale half [B, Hkv, folded, 1]
// sink_k, sink_v, tail_k, tail_v R [B, Hkv, rows, D]
// page_bias float [B, Hkv, vectors, pages]: R_K q · centre, scaled; page_of int [folded]: a row's page (CENTRED only)
// sums      float [B, Hkv, vectors, splits, D]    stats float [B, Hkv, vectors, splits, 2]: maximum, normalizer
const int kv_heads = dims[0];
const int group = dims[1];
const int rows = dims[2];
const int sinks = dims[3];
const int folded = dims[4];
const int tail = dims[5];
const int splits = dims[6];
const int page_splits = dims[7];
const int split_rows = dims[8];
const int chunks = dims[11];
const int vectors = group * rows;

const int lane = thread_index_in_simdgroup;
const int simd = simdgroup_index_in_threadgroup;
const int worker = simd * LANES + lane;
const int split = threadgroup_position_in_grid.y;
const int head = threadgroup_position_in_grid.z / chunks % kv_heads;
const int sequence = threadgroup_position_in_grid.z / chunks / kv_heads;
const int place = sequence * kv_heads + head;

Step step;
step.rows = rows;
step.first = folded + tail - rows;
step.window = dims[9];
step.keep = dims[10];
step.vector = int(threadgroup_position_in_grid.z) % chunks * N;
step.vectors = vectors;

threadgroup float2 k_table[table_size(K_CODEC)];
threadgroup float2 v_table[table_size(V_CODEC)];
threadgroup float peaks[SIMDS * N];
threadgroup float totals[SIMDS * N];
threadgroup float shares[SIMDS * D];

const bool pages = split < page_splits;
const int unit = lane % lanes_of_row(D);
float query[N][UNIT];
float acc[N][UNIT];
float peak[N];
float total[N];
for (int n = 0; n < N; n++) {
  // Vectors beyond the last are computed like the last, and dropped.
  const int vector = min(step.vector + n, vectors - 1);
  const int64_t at = sequence * q_strides[0] + (head * group + vector / rows) * q_strides[1] + vector % rows * q_strides[2];
  for (int i = 0; i < UNIT; i++) {
    const int d = unit * UNIT + i;
    if (d >= D) {
      query[n][i] = 0.0f;
    } else if (pages && (K_CODEC == TURBO4 || K_CODEC == TURBO3)) {
      query[n][i] = turned[(int64_t(place) * vectors + vector) * D + d];
    } else {
      query[n][i] = float(q[at + d * q_strides[3]]) * factor[0];
    }
    acc[n][i] = 0.0f;
  }
  peak[n] = LOWEST;
  total[n] = 0.0f;
}

if (pages) {
  fill_table<K_CODEC>(k_table, worker, k_levels);
  fill_table<V_CODEC>(v_table, worker, v_levels);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  const auto k = page_rows<K_CODEC>(
      k_codes + sequence * k_codes_strides[0] + head * k_codes_strides[1],
      k_scale + sequence * k_scale_strides[0] + head * k_scale_strides[1],
      k_codes_strides[2], k_scale_strides[2], k_table);
  const auto v = page_rows<V_CODEC>(
      v_codes + sequence * v_codes_strides[0] + head * v_codes_strides[1],
      v_scale + sequence * v_scale_strides[0] + head * v_scale_strides[1],
      v_codes_strides[2], v_scale_strides[2], v_table);
  const auto centers = page_centers<CENTRED>(
      page_bias + sequence * page_bias_strides[0] + head * page_bias_strides[1],
      page_of, page_bias_strides[2], page_bias_strides[3]);
  const int start = sinks + split * split_rows;
  const int stop = min(folded, start + split_rows);
  attend_tiles<D, N>(k, v, centers, step, start, stop, lane, simd, query, acc, peak, total);
} else {
  const auto k = raw_rows(
      sink_k + sequence * sink_k_strides[0] + head * sink_k_strides[1],
      tail_k + sequence * tail_k_strides[0] + head * tail_k_strides[1],
      sink_k_strides[2], tail_k_strides[2], sinks, folded);
  const auto v = raw_rows(
      sink_v + sequence * sink_v_strides[0] + head * sink_v_strides[1],
      tail_v + sequence * tail_v_strides[0] + head * tail_v_strides[1],
      sink_v_strides[2], tail_v_strides[2], sinks, folded);
  const auto no_centers = page_centers<false>(page_bias, page_of, 0, 0);
  const int start = (split - page_splits) * split_rows;
  const int stop = min(sinks + tail, start + split_rows);
  attend_tiles<D, N>(k, v, no_centers, step, start, stop, lane, simd, query, acc, peak, total);
}

for (int n = 0; n < N; n++) {
  for (int i = 0; i < UNIT; i++) {
    for (int offset = lanes_of_row(D); offset < LANES; offset *= 2) {
      acc[n][i] += simd_shuffle_xor(acc[n][i], offset);
    }
  }
  if (lane == 0) {
    peaks[simd * N + n] = peak[n];
    totals[simd * N + n] = total[n];
  }
}

// The simdgroups' shares merge in threadgroup memory, one query vector after another.
for (int n = 0; n < N; n++) {
  threadgroup_barrier(mem_flags::mem_threadgroup);  // the vector before has been read
  if (lane < D / UNIT) {
    for (int i = 0; i < UNIT; i++) {
      shares[simd * D + lane * UNIT + i] = acc[n][i];
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);  // this one is written
  if (step.vector + n < vectors) {
    float top = LOWEST;
    for (int s = 0; s < SIMDS; s++) {
      top = max(top, peaks[s * N + n]);
    }
    const int64_t at = (int64_t(place) * vectors + step.vector + n) * splits + split;
    for (int d = worker; d < D; d += THREADS) {
      float sum = 0.0f;
      for (int s = 0; s < SIMDS; s++) {
        sum += shares[s * D + d] * precise::exp2(peaks[s * N + n] - top);
      }
      sums[at * D + d] = sum;
    }
    if (worker == 0) {
      float sum = 0.0f;
      for (int s = 0; s < SIMDS; s++) {
        sum += totals[s * N + n] * precise::exp2(peaks[s * N + n] - top);
      }
      stats[at * 2] = top;
      stats[at * 2 + 1] = sum;
    }
  }
}
