// TRAIN_GPT_CUDNN is defined if the build found cuDNN's frontend: headers that describe the
// operation as a graph to whichever version of the library is present at run time. Nothing is
// linked against cuDNN.
#include "kernels/attention/cudnn.h"

#ifdef TRAIN_GPT_CUDA
#include <algorithm>
#include <bit>
#include <cstdlib>
#include <filesystem>
#include <initializer_list>
#include <map>
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

namespace {

constexpr const char* not_aligned = "cuDNN is used for tensors aligned to 16 bytes";

bool are_aligned(std::initializer_list<HeadsView> views) {
    return std::ranges::all_of(views, [](const HeadsView& view) {
        return reinterpret_cast<uintptr_t>(view.data) % 16 == 0 && view.batch % 8 == 0 &&
               view.token % 8 == 0 && view.head % 8 == 0;
    });
}

/// Data-center Blackwell adds up dq in order without a matrix of the scores.
bool has_score_matrix(int architecture) { return architecture / 10 != 10; }

/// A call's heads of queries, times the bytes of something that is held for each.
size_t for_each_head(const AttentionShape& s, int64_t elements, size_t element_bytes) {
    return static_cast<size_t>(s.B) * static_cast<size_t>(s.H) * static_cast<size_t>(elements) *
           element_bytes;
}
/// The gradients of the scores.
size_t score_bytes(const AttentionShape& s) {
    return for_each_head(s, int64_t{s.T} * s.S, size_of(DType::bf16));
}
/// dk and dv in fp32 for each head of queries, if several share a key head.
size_t shared_bytes(const AttentionShape& s) {
    return s.H_kv < s.H ? for_each_head(s, int64_t{2} * s.S * s.D, sizeof(float)) : 0;
}
/// What the limit holds for: the larger of a call's matrices.
size_t matrix_bytes(const AttentionShape& s, int architecture) {
    return std::max(shared_bytes(s), has_score_matrix(architecture) ? score_bytes(s) : 0);
}

HeadsView part_of(const HeadsView& view, DType dtype, int b, int h) {
    HeadsView part = view;
    part.data = static_cast<char*>(view.data) +
                (b * view.batch + h * view.head) * static_cast<int64_t>(size_of(dtype));
    return part;
}

/// Sequences b to b + B − 1, key heads h_kv to h_kv + H_kv − 1 and the heads that share them.
AttentionBackward part_of(const AttentionBackward& args, int b, int B, int h_kv, int H_kv) {
    AttentionBackward part = args;
    const int group = args.shape.H / args.shape.H_kv, h = h_kv * group;
    part.shape.B = B;
    part.shape.H = H_kv * group;
    part.shape.H_kv = H_kv;
    for (HeadsView AttentionBackward::*view : {&AttentionBackward::q, &AttentionBackward::out,
                                               &AttentionBackward::dout, &AttentionBackward::dq})
        part.*view = part_of(args.*view, args.shape.dtype, b, h);
    for (HeadsView AttentionBackward::*view : {&AttentionBackward::k, &AttentionBackward::v,
                                               &AttentionBackward::dk, &AttentionBackward::dv})
        part.*view = part_of(args.*view, args.shape.dtype, b, h_kv);
    part.lse = args.lse + (int64_t{b} * args.shape.H + h) * args.shape.T;
    return part;
}

/// How many of `count` things a call takes, if `most` fit: with the fewest calls, as evenly as
/// possible.
int per_call(int count, size_t most) {
    const int fitting = static_cast<int>(std::min(static_cast<size_t>(count), most));
    const int calls = (count + fitting - 1) / fitting;
    return (count + calls - 1) / calls;
}

/// The sequences and key heads of a call, both 0 if even one head of one sequence is too large.
std::pair<int, int> sizes_of_calls(const AttentionShape& shape, int architecture, size_t limit) {
    AttentionShape one = shape;
    one.B = 1;
    if (const size_t bytes = matrix_bytes(one, architecture); bytes <= limit)
        return {bytes ? per_call(shape.B, limit / bytes) : shape.B, shape.H_kv};
    one.H = shape.H / shape.H_kv;
    one.H_kv = 1;
    const size_t fitting = limit / matrix_bytes(one, architecture);
    return fitting ? std::pair(1, per_call(shape.H_kv, fitting)) : std::pair(0, 0);
}

}  // namespace

// Other lengths than multiples of 128 are excluded, because the frontend pads them with a mask,
// which for many versions of cuDNN it copies from the host in every call.
std::string cudnn_limit(const AttentionShape& s) {
    if (s.dtype != DType::bf16) return "cuDNN is used for bf16 alone";
    if (s.doc_start) return "cuDNN is not used with a document mask";
    if (s.T % 128 != 0 || s.S % 128 != 0) return "cuDNN is used for multiples of 128 tokens alone";
    if (s.D % 8 != 0 || s.D > 128)
        return "cuDNN is used for head sizes up to 128 that are multiples of 8";
    if (s.H % s.H_kv != 0) return "cuDNN needs as many heads for each key head";
    return "";
}

std::string cudnn_limit(const AttentionForward& args) {
    if (!args.lse) return "cuDNN is used in training and evaluation alone";
    std::string limit = cudnn_limit(args.shape);
    if (limit.empty() && !are_aligned({args.q, args.k, args.v, args.out})) limit = not_aligned;
    return limit;
}

std::string cudnn_limit(const AttentionBackward& args) {
    if (args.key_gradients != KeyGradients::write)
        return "cuDNN cannot add to the gradients of keys";
    std::string limit = cudnn_limit(args.shape);
    if (limit.empty() &&
        !are_aligned({args.q, args.k, args.v, args.out, args.dout, args.dq, args.dk, args.dv}))
        limit = not_aligned;
    return limit;
}

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

// Only cuDNN knows how much a pass needs, and only after the pass is built, which takes a second;
// planning asks for this number many times. So these are the amounts that it was observed to need.
// A version that needs more is not used. Forward: 256 bytes. Backward: Σ dout·out of each row; the
// gradient of the scores as a matrix, because the deterministic algorithm adds up dq in order; and,
// if heads share keys and values, their gradients for each head of queries, in bf16 while the
// scores are there and in fp32 otherwise.
size_t cudnn_backward_bytes(const AttentionShape& shape, int architecture) {
    const auto [sequences, key_heads] = sizes_of_calls(shape, architecture, most_matrix_bytes);
    AttentionShape call = shape;
    call.B = sequences;
    call.H = shape.H / shape.H_kv * key_heads;
    call.H_kv = key_heads;
    const size_t sums = for_each_head(call, call.T, sizeof(float));
    const size_t shared = shared_bytes(call);
    return 4096 + sums +
           (has_score_matrix(architecture) ? std::max(shared, shared / 2 + score_bytes(call))
                                           : shared);
}

std::vector<AttentionBackward> cudnn_calls(const AttentionBackward& args, int architecture,
                                           size_t most) {
    const AttentionShape& s = args.shape;
    const auto [sequences, key_heads] = sizes_of_calls(s, architecture, most);
    std::vector<AttentionBackward> calls;
    if (sequences == 0) return calls;
    for (int b = 0; b < s.B; b += sequences)
        for (int h_kv = 0; h_kv < s.H_kv; h_kv += key_heads)
            calls.push_back(part_of(args, b, std::min(sequences, s.B - b), h_kv,
                                    std::min(key_heads, s.H_kv - h_kv)));
    return calls;
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
size_t ask_cudnn(const AttentionBackward&, int, const std::string&) {
    throw Error(cudnn_obstacle());
}

#else

namespace {

namespace fe = cudnn_frontend;

constexpr size_t oldest_version = 90000;

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

enum Uid : int64_t { uid_q = 1, uid_k, uid_v, uid_out, uid_lse, uid_dout, uid_dq, uid_dk, uid_dv };

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

    static void output(Tensor& tensor, Uid uid, const AttentionShape& s, const HeadsView& view) {
        describe(tensor, uid, s, view);
        tensor.set_output(true);
    }

    /// Takes the first plan of cuDNN's heuristics, which depends only on the shape, the GPU and the
    /// version.
    void build(cudnnHandle_t handle) {
        require(graph.build(handle, {fe::HeurMode_t::A}));
        ask_for_workspace();
    }
    /// The same for the device whose properties the graph has been given.
    void build_without_device() {
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

void describe(Graph& g, const AttentionForward& args) {
    const AttentionShape& s = args.shape;
    auto [out, lse] = g.graph.sdpa(g.input(uid_q, s, args.q), g.input(uid_k, s, args.k),
                                   g.input(uid_v, s, args.v),
                                   fe::graph::SDPA_attributes()
                                       .set_name("attention_forward")
                                       .set_generate_stats(true)
                                       .set_diagonal_alignment(alignment(s))
                                       .set_diagonal_band_right_bound(0)
                                       .set_attn_scale(s.scale));
    Graph::output(*out, uid_out, s, args.out);
    describe_lse(*lse, s);
    lse->set_output(true);
}

void describe(Graph& g, const AttentionBackward& args) {
    const AttentionShape& s = args.shape;
    Tensor lse;
    describe_lse(lse, s);
    auto [dq, dk, dv] = g.graph.sdpa_backward(
        g.input(uid_q, s, args.q), g.input(uid_k, s, args.k), g.input(uid_v, s, args.v),
        g.input(uid_out, s, args.out), g.input(uid_dout, s, args.dout), g.graph.tensor(lse),
        fe::graph::SDPA_backward_attributes()
            .set_name("attention_backward")
            .set_diagonal_alignment(alignment(s))
            .set_diagonal_band_right_bound(0)
            .set_attn_scale(s.scale)
            .set_deterministic_algorithm(true));
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
        const size_t version = cudnn_version();
        return concat("cuDNN ", version / 10000, ".", version / 100 % 100, ".", version % 100);
    }

    void forward(const AttentionForward& args, void* workspace, size_t workspace_bytes) override {
        execute(forward_graphs_, args, {args.q, args.k, args.v, args.out},
                {{uid_q, args.q.data},
                 {uid_k, args.k.data},
                 {uid_v, args.v.data},
                 {uid_out, args.out.data},
                 {uid_lse, args.lse}},
                workspace, workspace_bytes);
    }

    void backward(const AttentionBackward& args, void* workspace, size_t workspace_bytes) override {
        execute(backward_graphs_, args,
                {args.q, args.k, args.v, args.out, args.dout, args.dq, args.dk, args.dv},
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
    /// Everything that a graph depends on.
    using Key = std::vector<int64_t>;
    using Graphs = std::map<Key, Graph>;

    static Key key_of(const AttentionShape& s, std::initializer_list<HeadsView> views) {
        Key key{s.B, s.T, s.S, s.H, s.H_kv, s.D, std::bit_cast<int32_t>(s.scale)};
        for (const HeadsView& view : views)
            key.insert(key.end(), {view.batch, view.token, view.head});
        return key;
    }

    template <class Args>
    void execute(Graphs& graphs, const Args& args, std::initializer_list<HeadsView> views,
                 std::unordered_map<int64_t, void*> addresses, void* workspace,
                 size_t workspace_bytes) {
        const auto [found, is_new] = graphs.try_emplace(key_of(args.shape, views));
        Graph& g = found->second;
        if (is_new) {
            describe(g, args);
            g.build(handle_);
        }
        if (g.workspace_bytes > workspace_bytes)
            throw Error("cuDNN needs ", (g.workspace_bytes >> 20) + 1,
                        " MiB of scratch memory for it and ", workspace_bytes >> 20,
                        " MiB are planned");
        require(g.graph.execute(handle_, addresses, workspace));
    }

    Handle handle_;
    Graphs forward_graphs_, backward_graphs_;
};

template <class Args>
size_t ask(const Args& args, int architecture, const std::string& properties) {
    const auto device = std::make_shared<fe::DeviceProperties>();
    require(device->deserialize({properties.begin(), properties.end()}));
    Graph g;
    g.graph.set_device_properties(device);
    g.graph.set_sm_version(architecture);  // before the nodes, which copy it
    describe(g, args);
    g.build_without_device();
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
    return ask(args, architecture, properties);
}
size_t ask_cudnn(const AttentionBackward& args, int architecture, const std::string& properties) {
    return ask(args, architecture, properties);
}

#endif  // TRAIN_GPT_CUDNN

}  // namespace train_gpt::cuda
#endif  // TRAIN_GPT_CUDA
