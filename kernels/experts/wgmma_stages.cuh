// What grouped products with Hopper's own instructions share (grouped_wgmma.cu,
// grouped_fp8_wgmma.cu): a ring of stages in shared memory. A warpgroup fills them, two others
// multiply 64 rows of a tile each. Stages are filled for the next tile while a tile is written.
#pragma once
#include <algorithm>
#include <cstdint>

#include "kernels/attention/tile.cuh"
#include "kernels/experts/group_tiles.cuh"
#include "kernels/wgmma.cuh"

namespace train_gpt::cuda::wgmma_stages {

constexpr int tile_rows = 128, group_threads = hopper::warpgroup_size, consumers = 2,
              threads = (consumers + 1) * group_threads, consumer_warps = consumers * 4;
/// The bytes of a slice's row: 64 elements of bf16, or 128 codes of fp8.
constexpr int stage_row_bytes = 128;
/// 504 registers for the three threads of each warpgroup's lane: block_n = 256 has 128 sums.
constexpr int producer_registers = 56, consumer_registers = 224;
/// Tiles of an expert's rows that run beside each other (RowTiles::find).
constexpr int band = 16;

/// Stages of a slice of the left operand (128 rows or columns) and of the right one (block_n), as
/// many as fit: more bytes are then on their way than bandwidth times latency.
template <int block_n>
struct StageMemory {
    static constexpr int left_bytes = tile_rows * stage_row_bytes,
                         right_bytes = block_n * stage_row_bytes,
                         stage_bytes = left_bytes + right_bytes, stages = block_n == 256 ? 4 : 6,
                         barriers = stages * stage_bytes, end = barriers + 2 * stages * 8;

    uint32_t begin;

    __device__ __forceinline__ uint32_t left(int i) const { return begin + i * stage_bytes; }
    __device__ __forceinline__ uint32_t right(int i) const { return left(i) + left_bytes; }
    __device__ __forceinline__ uint32_t full(int i) const { return begin + barriers + i * 8; }
    __device__ __forceinline__ uint32_t empty(int i) const { return full(stages + i); }

    /// A slice has arrived when the copy engine's bytes have, and all threads of the producer have
    /// reported their copies.
    __device__ __forceinline__ void init() const {
        for (int i = 0; i < stages; ++i) {
            hopper::init_barrier(full(i), 1 + group_threads);
            hopper::init_barrier(empty(i), consumer_warps);
        }
        hopper::publish_barriers();
    }
};
static_assert(StageMemory<256>::end + 1023 + (most_experts + 1) * 4 <= 227 << 10);
static_assert(StageMemory<128>::end + 1023 + (most_experts + 1) * 4 <= 227 << 10);

/// The producer's threads report a stage to which they copy themselves one slice late, when their
/// copies have arrived; those to the next stage are then on their way.
template <int block_n>
class Reports {
  public:
    __device__ __forceinline__ explicit Reports(const StageMemory<block_n>& memory)
        : memory_(memory) {}
    /// After a stage's copies have been started, some of them by the thread or all by the engine.
    __device__ __forceinline__ void started(int stage, bool by_threads) {
        if (!by_threads) {
            finish();
            hopper::arrive(memory_.full(stage));
            return;
        }
        asm volatile("cp.async.commit_group;" ::: "memory");
        if (late_ >= 0) report<1>();
        late_ = stage;
    }
    __device__ __forceinline__ void finish() {
        if (late_ >= 0) report<0>();
        late_ = -1;
    }

  private:
    template <int pending>
    __device__ __forceinline__ void report() const {
        asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory");
        // wgmma is to see what these copies wrote.
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        hopper::arrive(memory_.full(late_));
    }
    const StageMemory<block_n>& memory_;
    int late_ = -1;
};

/// A thread's copies of 16 bytes to a slice with rows of 128 bytes: chunk `chunk()` of the rows
/// row() + 16·i.
constexpr int rows_at_once = group_threads / 8;
__device__ __forceinline__ int copy_row() { return tiles::thread_index() / 8; }
__device__ __forceinline__ int copy_chunk() { return tiles::thread_index() % 8; }

__device__ __forceinline__ uint32_t tiles_begin(const void* memory) {
    return (tiles::shared_address(memory) + 1023u) & ~1023u;
}

/// Blocks have a multiprocessor each, but there are no more than tiles.
template <class Kernel, class Maps, class Args>
void launch(const Stream& stream, Kernel* kernel, int shared_bytes, int64_t tile_count,
            const Maps& maps, const Args& args) {
    CUDA_CHECK(
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes));
    const int64_t multiprocessors =
        std::max(1, limits_of(stream).multiprocessors - stream.settings.reserved_sms);
    kernel<<<static_cast<unsigned>(std::clamp<int64_t>(tile_count, 1, multiprocessors)), threads,
             static_cast<size_t>(shared_bytes), stream_of(stream)>>>(maps, args);
    CUDA_CHECK_LAUNCH();
}

template <int block_n>
constexpr int shared_bytes = StageMemory<block_n>::end + 1023 + (most_experts + 1) * 4;

}  // namespace train_gpt::cuda::wgmma_stages
