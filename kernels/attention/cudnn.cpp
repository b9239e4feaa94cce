// TRAIN_GPT_CUDNN is defined if the build found cuDNN's frontend: headers that describe the
// operation as a graph to whichever version of the library is present at run time. Nothing is
// linked against cuDNN.
#include "kernels/attention/cudnn.h"

#ifdef TRAIN_GPT_CUDA
#include <bit>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <initializer_list>
#include <map>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "base/error.h"
#include "kernels/attention/engine.h"

#ifdef TRAIN_GPT_CUDNN
#include <dlfcn.h>

#define NV_CUDNN_FRONTEND_USE_DYNAMIC_LOADING
#define CUDNN_FRONTEND_SKIP_JSON_LIB
#include <cudnn_frontend.h>

namespace cudnn_frontend {
void* cudnn_dlhandle = nullptr;  // where the frontend looks up the library's functions
}
#endif

namespace train_gpt::cuda {

// If none can be used, the first that is there says why; otherwise the loader's answer.
const std::string& cudnn_obstacle() {
    static const std::string obstacle = [] {
        std::string loader, present;
        preload_nvrtc();  // cuDNN compiles some of its kernels
        for (const std::string& place : places_of(cudnn_library)) {
            const std::string reason = cudnn_obstacle(place);
            if (reason.empty()) return reason;
            std::string& kept = place == cudnn_library.name ? loader : present;
            if (kept.empty()) kept = reason;
        }
        return present.empty() ? loader : present;
    }();
    return obstacle;
}

#ifndef TRAIN_GPT_CUDNN

std::string cudnn_obstacle(const std::string&, bool) {
    return "this build was made without cuDNN's frontend headers (make setup fetches them)";
}

size_t cudnn_version() { return 0; }

std::unique_ptr<AttentionLibrary> open_cudnn_attention(CUstream_st*) {
    throw Error(cudnn_obstacle());
}

size_t ask_cudnn(const AttentionForward&, int, const std::string&) {
    throw Error(cudnn_obstacle());
}
size_t ask_cudnn(const AttentionBackward&, AttentionWay, int, const std::string&) {
    throw Error(cudnn_obstacle());
}

#else

namespace {

namespace fe = cudnn_frontend;

constexpr size_t oldest_version = 90000;

// Between its two deterministic algorithms the frontend chooses by this variable, which it reads
// while it builds a graph: the bytes that the matrix may have. setenv() may not be called while
// other threads run. So the variable enters the environment once, when the library is loaded, and
// its last two characters change in place. A value that the user has set is replaced: both
// algorithms are candidates anyway.
char matrix_limit[] = "CUDNN_FRONTEND_ATTN_DP_WORKSPACE_LIMIT=-1";
std::mutex building;

void allow_matrix(bool allowed) {
    std::memcpy(matrix_limit + sizeof matrix_limit - 3, allowed ? "-1" : "00", 2);
}

/// Graph errors list every plan that was tried; the first line says what is wrong.
void require(fe::error_t status) {
    if (status.is_good()) return;
    const std::string text = status.get_message();
    throw Error("cuDNN reports: ", text.substr(0, text.find('\n')));
}

void require(cudnnStatus_t status, const char* what) {
    if (status != CUDNN_STATUS_SUCCESS)
        throw Error("cuDNN does not ", what, ": ", fe::detail::get_error_string(status));
}

enum Uid : int64_t {
    uid_q = 1,
    uid_k,
    uid_v,
    uid_out,
    uid_lse,
    uid_dout,
    uid_dq,
    uid_dk,
    uid_dv,
    uid_sinks
};

using Tensor = fe::graph::Tensor_attributes;

/// Dimensions [B, H, T, D] or [B, H_kv, S, D], in the order that cuDNN uses whatever the order in
/// memory is.
void describe(Tensor& tensor, Uid uid, const AttentionShape& s, const HeadsView& view) {
    const bool of_keys = uid == uid_k || uid == uid_v || uid == uid_dk || uid == uid_dv;
    tensor.set_uid(uid)
        .set_dim({s.B, of_keys ? s.H_kv : s.H, of_keys ? s.S : s.T, s.D})
        .set_stride({view.batch, view.head, view.token, 1});
}

void describe_lse(Tensor& tensor, const AttentionShape& s) {
    tensor.set_uid(uid_lse)
        .set_dim({s.B, s.H, s.T, 1})
        .set_stride({int64_t{s.H} * s.T, s.T, 1, 1})
        .set_data_type(fe::DataType_t::FLOAT);
}

/// Query t is at position t + S − T. For T = S both mean the same, and older versions know only
/// TOP_LEFT.
fe::DiagonalAlignment_t alignment(const AttentionShape& s) {
    return s.T == s.S ? fe::DiagonalAlignment_t::TOP_LEFT : fe::DiagonalAlignment_t::BOTTOM_RIGHT;
}

struct Graph {
    fe::graph::Graph graph;
    size_t workspace_bytes = 0;

    Graph() {
        graph.set_io_data_type(fe::DataType_t::BFLOAT16)
            .set_intermediate_data_type(fe::DataType_t::FLOAT)
            .set_compute_data_type(fe::DataType_t::FLOAT);
    }

    std::shared_ptr<Tensor> input(Uid uid, const AttentionShape& s, const HeadsView& view) {
        Tensor tensor;
        describe(tensor, uid, s, view);
        return graph.tensor(tensor);
    }

    std::shared_ptr<Tensor> sinks(const AttentionShape& s) {
        Tensor tensor;
        tensor.set_uid(uid_sinks)
            .set_dim({1, s.H, 1, 1})
            .set_stride({s.H, 1, 1, 1})
            .set_data_type(fe::DataType_t::FLOAT);
        return graph.tensor(tensor);
    }

    static void output(Tensor& tensor, Uid uid, const AttentionShape& s, const HeadsView& view) {
        describe(tensor, uid, s, view);
        tensor.set_output(true);
    }

    /// Takes the first plan of cuDNN's heuristics, which depends only on the shape, the GPU and the
    /// version.
    void build(AttentionWay way, cudnnHandle_t handle) {
        const std::lock_guard lock(building);
        allow_matrix(way != AttentionWay::cudnn_ordered);
        require(graph.build(handle, {fe::HeurMode_t::A}));
        ask_for_workspace();
    }
    /// The same for the device whose properties the graph has been given.
    void build_without_device(AttentionWay way) {
        const std::lock_guard lock(building);
        allow_matrix(way != AttentionWay::cudnn_ordered);
        require(graph.validate());
        require(graph.build_operation_graph());
        require(graph.create_execution_plans({fe::HeurMode_t::A}));
        require(graph.check_support());
        require(graph.build_plans());
        ask_for_workspace();
    }

  private:
    void ask_for_workspace() {
        int64_t bytes = 0;
        require(graph.get_workspace_size(bytes));
        workspace_bytes = static_cast<size_t>(bytes);
    }
};

/// The keys that a query sees.
template <class Attributes>
void describe_mask(Attributes& attributes, const AttentionShape& s) {
    attributes.set_diagonal_alignment(alignment(s)).set_diagonal_band_right_bound(0);
    if (const int bound = cudnn_left_bound(s)) attributes.set_diagonal_band_left_bound(bound);
}

void describe(Graph& g, const AttentionForward& args, AttentionWay) {
    const AttentionShape& s = args.shape;
    auto attributes = fe::graph::SDPA_attributes()
                          .set_name("attention_forward")
                          .set_generate_stats(true)
                          .set_attn_scale(s.scale);
    describe_mask(attributes, s);
    if (args.sinks) attributes.set_sink_token(g.sinks(s));
    auto [out, lse] = g.graph.sdpa(g.input(uid_q, s, args.q), g.input(uid_k, s, args.k),
                                   g.input(uid_v, s, args.v), attributes);
    Graph::output(*out, uid_out, s, args.out);
    describe_lse(*lse, s);
    lse->set_output(true);
}

/// lse has the sinks' terms, so that dq, dk and dv need nothing else of the sinks.
void describe(Graph& g, const AttentionBackward& args, AttentionWay way) {
    if (CUDNN_FRONTEND_VERSION < 13200 && way == AttentionWay::cudnn_ordered)
        throw Error("the build's frontend of cuDNN does not know it");
    const AttentionShape& s = args.shape;
    Tensor lse;
    describe_lse(lse, s);
    auto attributes = fe::graph::SDPA_backward_attributes()
                          .set_name("attention_backward")
                          .set_attn_scale(s.scale)
                          .set_deterministic_algorithm(way != AttentionWay::cudnn_unordered);
    describe_mask(attributes, s);
    auto [dq, dk, dv] =
        g.graph.sdpa_backward(g.input(uid_q, s, args.q), g.input(uid_k, s, args.k),
                              g.input(uid_v, s, args.v), g.input(uid_out, s, args.out),
                              g.input(uid_dout, s, args.dout), g.graph.tensor(lse), attributes);
    Graph::output(*dq, uid_dq, s, args.dq);
    Graph::output(*dk, uid_dk, s, args.dk);
    Graph::output(*dv, uid_dv, s, args.dv);
}

class Handle {
  public:
    Handle() { require(fe::detail::create_handle(&handle_), "start"); }
    ~Handle() { fe::detail::destroy_handle(handle_); }
    Handle(const Handle&) = delete;
    Handle& operator=(const Handle&) = delete;
    operator cudnnHandle_t() const { return handle_; }

  private:
    cudnnHandle_t handle_ = nullptr;
};

class CudnnAttention : public AttentionLibrary {
  public:
    explicit CudnnAttention(cudaStream_t stream) {
        require(fe::detail::set_stream(handle_, stream), "take the stream");
    }

    std::string name() const override {
        return concat("cuDNN ", version() / 10000, ".", version() / 100 % 100, ".",
                      version() % 100);
    }

    size_t version() const override { return cudnn_version(); }

    void forward(const AttentionForward& args, void* workspace, size_t workspace_bytes) override {
        std::unordered_map<int64_t, void*> addresses{{uid_q, args.q.data},
                                                     {uid_k, args.k.data},
                                                     {uid_v, args.v.data},
                                                     {uid_out, args.out.data},
                                                     {uid_lse, args.lse}};
        if (args.sinks) addresses[uid_sinks] = args.sinks.data;
        execute(AttentionWay::cudnn, args, {args.q, args.k, args.v, args.out}, addresses, workspace,
                workspace_bytes);
    }

    void backward(AttentionWay way, const AttentionBackward& args, void* workspace,
                  size_t workspace_bytes) override {
        execute(way, args, {args.q, args.k, args.v, args.out, args.dout, args.dq, args.dk, args.dv},
                {{uid_q, args.q.data},
                 {uid_k, args.k.data},
                 {uid_v, args.v.data},
                 {uid_out, args.out.data},
                 {uid_lse, const_cast<float*>(args.lse)},
                 {uid_dout, args.dout.data},
                 {uid_dq, args.dq.data},
                 {uid_dk, args.dk.data},
                 {uid_dv, args.dv.data}},
                workspace, workspace_bytes);
    }

  private:
    /// Everything that a graph depends on. The passes have different numbers of views.
    using Key = std::vector<int64_t>;

    static Key key_of(AttentionWay way, const AttentionShape& s, bool with_sinks,
                      std::initializer_list<HeadsView> views) {
        Key key{static_cast<int64_t>(way),
                s.B,
                s.T,
                s.S,
                s.H,
                s.H_kv,
                s.D,
                std::bit_cast<int32_t>(s.scale),
                cudnn_left_bound(s),
                with_sinks};
        for (const HeadsView& view : views)
            key.insert(key.end(), {view.batch, view.token, view.head});
        return key;
    }

    template <class Args>
    void execute(AttentionWay way, const Args& args, std::initializer_list<HeadsView> views,
                 std::unordered_map<int64_t, void*> addresses, void* workspace,
                 size_t workspace_bytes) {
        const auto [found, is_new] =
            graphs_.try_emplace(key_of(way, args.shape, bool(args.sinks), views));
        Graph& g = found->second;
        if (is_new) {
            describe(g, args, way);
            g.build(way, handle_);
        }
        if (g.workspace_bytes > workspace_bytes)
            throw Error("cuDNN needs ", (g.workspace_bytes >> 20) + 1,
                        " MiB of scratch memory for it and ", workspace_bytes >> 20,
                        " MiB are planned");
        require(g.graph.execute(handle_, addresses, workspace));
    }

    Handle handle_;
    std::map<Key, Graph> graphs_;
};

template <class Args>
size_t ask(const Args& args, AttentionWay way, int architecture, const std::string& properties) {
    const auto device = std::make_shared<fe::DeviceProperties>();
    require(device->deserialize({properties.begin(), properties.end()}));
    Graph g;
    g.graph.set_device_properties(device);
    g.graph.set_sm_version(architecture);  // before the nodes, which copy it
    describe(g, args, way);
    g.build_without_device(way);
    return g.workspace_bytes;
}

template <class Function>
Function* function_of(void* library, const char* name) {
    return reinterpret_cast<Function*>(dlsym(library, name));
}

/// Why a library is of no use, even before it is asked to start.
std::string unsuitable(void* library, const std::string& name) {
    const auto version_of = function_of<decltype(cudnnGetVersion)>(library, "cudnnGetVersion");
    if (!version_of) return name + " is not cuDNN";
    if (version_of() < oldest_version)
        return concat("cuDNN ", version_of(), " is too old; 9.0 or newer is needed");
    const auto cuda_of =
        function_of<decltype(cudnnGetCudartVersion)>(library, "cudnnGetCudartVersion");
    if (cuda_of && cuda_of() / 1000 != CUDART_VERSION / 1000)
        return concat(name, " is built for CUDA ", cuda_of() / 1000, ", and this program for CUDA ",
                      CUDART_VERSION / 1000);
    return "";
}

}  // namespace

// The frontend remembers the functions that it has looked up, including missing ones, so it is not
// used before all of them are known to exist.
std::string cudnn_obstacle(const std::string& name, bool with_gpu) {
    void* const library = dlopen(name.c_str(), RTLD_NOW | RTLD_GLOBAL);
    if (!library) return concat("cuDNN cannot be loaded (", dlerror(), ")");
    if (std::string reason = unsuitable(library, name); !reason.empty()) {
        dlclose(library);
        return reason;
    }
    fe::cudnn_dlhandle = library;

    // Otherwise the frontend loads the first version of libcudart that it finds by its own list of
    // names.
    setenv("CUDNN_FRONTEND_CUDART_LIB_NAME", concat("libcudart.so.", CUDART_VERSION / 1000).c_str(),
           0);
    putenv(matrix_limit);
    try {
        if (with_gpu) Handle{};
    } catch (const std::exception& error) {
        return error.what();
    }
    return "";
}

size_t cudnn_version() { return fe::cudnn_dlhandle ? fe::detail::get_backend_version() : 0; }

std::unique_ptr<AttentionLibrary> open_cudnn_attention(CUstream_st* stream) {
    if (!cudnn_obstacle().empty()) throw Error(cudnn_obstacle());
    return std::make_unique<CudnnAttention>(stream);
}

size_t ask_cudnn(const AttentionForward& args, int architecture, const std::string& properties) {
    return ask(args, AttentionWay::cudnn, architecture, properties);
}
size_t ask_cudnn(const AttentionBackward& args, AttentionWay way, int architecture,
                 const std::string& properties) {
    return ask(args, way, architecture, properties);
}

#endif  // TRAIN_GPT_CUDNN

}  // namespace train_gpt::cuda
#endif  // TRAIN_GPT_CUDA
