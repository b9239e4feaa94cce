// Clusters of thread blocks, which run at the same time and read each other's shared memory. GPUs
// have them from compute capability 9.0 on.
#pragma once
#include <cuda_runtime.h>

#include "device/cuda_queue.h"

namespace train_gpt::cuda {

constexpr unsigned max_cluster_blocks = 8;  // on all GPUs that have clusters

/// The blocks of this block's cluster. If not `exists`, the kernel was not launched in clusters,
/// and each block is alone.
template <bool exists>
struct Cluster {
    static constexpr bool is_alone = !exists;

    static __device__ __forceinline__ int size() {
        int size = 1;
#if __CUDA_ARCH__ >= 900
        if (exists) asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
#endif
        return size;
    }
    static __device__ __forceinline__ int rank() {
        int rank = 0;
#if __CUDA_ARCH__ >= 900
        if (exists) asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
#endif
        return rank;
    }
    /// A barrier for all threads of the cluster in two halves: a thread waits until all have
    /// arrived. What threads have written to their own shared memory before they arrive can be read
    /// by those that have waited.
    static __device__ __forceinline__ void arrive() {
#if __CUDA_ARCH__ >= 900
        if (!exists) return;
#if __CUDACC_VER_MAJOR__ >= 13
        // A release of shared memory alone does not wait for our writes to global memory.
        asm volatile(
            "fence.release.sync_restrict::shared::cta.cluster;\n"
            "barrier.cluster.arrive.relaxed.aligned;" ::
                : "memory");
#else
        asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
#endif
#endif
    }
    static __device__ __forceinline__ void wait() {
#if __CUDA_ARCH__ >= 900
        if (exists) asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
    }
    static __device__ __forceinline__ void barrier() {
        arrive();
        wait();
    }
    /// What the block with this rank has in its shared memory at the place that `from` has in ours.
    static __device__ __forceinline__ float load(const float* from, int rank) {
        float value = 0;
#if __CUDA_ARCH__ >= 900
        if (!exists) return *from;
        asm volatile(
            "{\n"
            ".reg .u32 address;\n"
            "mapa.shared::cluster.u32 address, %1, %2;\n"
            "ld.shared::cluster.f32 %0, [address];\n"
            "}"
            : "=f"(value)
            : "r"(static_cast<unsigned>(__cvta_generic_to_shared(from))), "r"(rank)
            : "memory");
#endif
        return value;
    }
};

/// A launch of a kernel in clusters of `size` blocks, which must be at most max_cluster_blocks. The
/// caller sets the number of blocks, a multiple of the size.
class ClusterLaunch {
  public:
    ClusterLaunch(const Stream& stream, unsigned size, unsigned threads, size_t shared_bytes) {
        cluster_.id = cudaLaunchAttributeClusterDimension;
        cluster_.val.clusterDim.x = size;
        cluster_.val.clusterDim.y = cluster_.val.clusterDim.z = 1;
        config.gridDim = size;
        config.blockDim = threads;
        config.dynamicSmemBytes = shared_bytes;
        config.stream = stream_of(stream);
        config.attrs = &cluster_;
        config.numAttrs = 1;
    }
    ClusterLaunch(const ClusterLaunch&) = delete;
    ClusterLaunch& operator=(const ClusterLaunch&) = delete;

    /// Whether the GPU and the kernel's code have clusters. Code for an older architecture that the
    /// driver compiled for this GPU has none.
    template <class Kernel>
    static bool has_clusters(const DeviceLimits& limits, Kernel* kernel) {
        cudaFuncAttributes attributes{};
        CUDA_CHECK(cudaFuncGetAttributes(&attributes, kernel));
        return limits.architecture >= 90 && attributes.ptxVersion >= 90;
    }
    /// How many of the kernel's clusters run at the same time.
    template <class Kernel>
    int resident(Kernel* kernel) const {
        int clusters = 0;
        CUDA_CHECK(cudaOccupancyMaxActiveClusters(&clusters, kernel, &config));
        return clusters;
    }

    cudaLaunchConfig_t config{};

  private:
    cudaLaunchAttribute cluster_{};
};

}  // namespace train_gpt::cuda
