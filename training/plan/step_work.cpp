#include "training/plan/step_work.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <memory>
#include <string>
#include <string_view>

#include "base/error.h"
#include "parallel/group_ctas.h"
#include "parallel/state/gradient_sums.h"
#include "training/plan/step_time.h"
#include "training/plan/traffic.h"
#include "training/plan/update_work.h"

namespace train_gpt {

PassTime& PassTime::operator+=(const PassTime& other) {
    products += other.products, attention += other.attention, memory += other.memory;
    tensor += other.tensor, context += other.context, offload += other.offload;
    return *this;
}

PassTime operator*(double factor, PassTime time) {
    return {factor * time.products, factor * time.attention, factor * time.memory,
            factor * time.tensor,   factor * time.context,   factor * time.offload};
}

namespace {

/// Ranks of a group, and by how much neighbours in it differ in their numbers.
struct Group {
    int ranks = 1, stride = 1;
};

Group group_along(Axis axis, const MeshLayout& mesh) {
    return {mesh.size(axis), mesh.stride(axis)};
}

/// The products of a block's layers, as Fp8Product names them.
enum BlockProduct : uint8_t { qkv, out, up, down, shared_up, shared_down, block_products };
constexpr std::array<std::string_view, block_products> product_words = {
    "qkv", "out", "up", "down", "shared_up", "shared_down"};

class WorkBuilder {
  public:
    WorkBuilder(const RunShape& shape, const Cluster& cluster, const WorkOptions& options)
        : shape_(shape),
          cluster_(cluster),
          options_(options),
          e_(options.efficiencies ? *options.efficiencies
                                  : efficiencies_of(options.software, cluster, options.fp8)),
          part_(share_of_spec(shape.spec, shape.mesh.size(Axis::tensor))),
          tokens_(int64_t{shape.config.batch.micro_batch} * shape.config.sequence_length() /
                  shape.mesh.size(Axis::context)),
          peak_(cluster.flops(shape.dtype)),
          product_peak_(options.fp8 ? cluster.flops_fp8 : peak_),
          offload_(cluster.is_cuda() ? shape.offload() : Offload{}) {
        if (product_peak_ == 0)
            throw Error("the cluster ", cluster.name, " has no products of ",
                        options.fp8 ? "fp8" : name_of(shape.dtype),
                        !cluster.is_cuda() && options.fp8
                            ? "; a CPU computes them in other types, more slowly"
                            : "; choose another one, or give the rate in its file");
        other_products_ = e_.products;
        if (options.fp8) find_fp8_products();
    }

    StepWork work() {
        StepWork work{.schedule = pipeline_schedule(pipeline_shape(shape_))};
        const MeshLayout& mesh = shape_.mesh;
        const std::shared_ptr<const Registry> whole = whole_registry(shape_);
        for (const int rank : mesh.first_ranks(Axis::pipeline))
            work.ranks.push_back(rank_work(*whole, rank));
        time_passes(work);
        work.gathers_each = sharding_of(shape_, 0).gathers_each();
        work.beside_exchanges = is_free(Axis::data) ? 0 : beside_exchanges();
        const double doublings = std::log2(std::max(1.0, mesh.world() / 8.0));
        work.factor = 1 + e_.doubling * doublings;
        return work;
    }

    void time_passes(StepWork& work) {
        halves_apart_ = work.schedule.halves_apart;
        for (RankWork& rank : work.ranks)
            for (std::vector<UnitWork>& stage : rank.stages)
                for (UnitWork& unit : stage) {
                    unit.forward = unit.backward_inputs = unit.backward_weights = {};
                    if (unit.layer >= 0)
                        add_work(unit, layer_work(part_.layer(unit.layer), unit.layer));
                    if (unit.has_head) add_work(unit, head_work());
                }
        const MeshLayout& mesh = shape_.mesh;
        const double message = static_cast<double>(tokens_) / mesh.size(Axis::tensor) *
                               shape_.spec.n_embd * static_cast<double>(size_of(shape_.dtype));
        const Group pipeline = group_along(Axis::pipeline, mesh);
        if (pipeline.ranks > 1 && !is_free(Axis::pipeline)) {
            const bool between_nodes = pipeline.stride >= cluster_.ranks_per_node;
            const Link& link = between_nodes ? cluster_.network : cluster_.node;
            work.send = link.latency + message / link.bandwidth;
        }
    }

  private:
    bool is_free(Axis axis) const { return options_.without == axis; }
    static bool rounds_each(const Sharding& s) { return s.gathers_each() && s.size > 1; }

    /// Other programs' runs have all products of blocks in fp8, as their fit takes them.
    void find_fp8_products() {
        const size_t layers = static_cast<size_t>(shape_.spec.n_layer);
        const bool by_configuration = shape_.config.precision.fp8 != Fp8Recipe::off;
        in_fp8_.assign(layers, {});
        for (auto& layer : in_fp8_) layer.fill(!by_configuration);
        if (!by_configuration) return;
        for (const Fp8Product& product : fp8_products(shape_)) {
            const size_t dot = product.name.find('.');
            const auto word = std::ranges::find(product_words, product.name.substr(dot + 1));
            in_fp8_[static_cast<size_t>(std::stoi(product.name))]
                   [static_cast<size_t>(word - product_words.begin())] = product.is_fp8();
        }
        fp8_weight_gradients_ = shape_.config.precision.fp8_weight_gradient;
        fp8_experts_weight_gradients_ = false;
        rounds_weights_ = true;
        if (!options_.efficiencies)
            other_products_ = efficiencies_of(options_.software, cluster_, false).products;
    }
    bool in_fp8(int layer, BlockProduct product) const {
        return !in_fp8_.empty() && in_fp8_[static_cast<size_t>(layer)][product];
    }

    /// Collectives of this program hold so many of a GPU's multiprocessors.
    double beside_exchanges() const {
        if (options_.software != Software::own || !cluster_.is_cuda()) return e_.beside_exchanges;
        constexpr int of_nccl = 24;  // group_ctas.h
        const GroupCtas ctas =
            group_ctas(shape_.mesh.world(), mesh_sizes(shape_.config), cluster_.multiprocessors,
                       shape_.config.parallel.nccl_max_ctas);
        return double{1} * (ctas.exchange > 0 ? ctas.exchange : of_nccl) / cluster_.multiprocessors;
    }

    /// Bytes of a collective's whole buffer, of which a rank sends (ranks − 1) / ranks.
    double collective(double bytes, const Group& group, Axis axis) const {
        if (group.ranks == 1 || is_free(axis) || bytes == 0) return 0;
        return bytes * (group.ranks - 1) / group.ranks /
                   cluster_.bus_bandwidth(bytes, group.ranks, group.stride) +
               cluster_.latency(group.ranks, group.stride);
    }

    double product(double M, double N, double K, bool fp8) const {
        const double small = std::min({N, K, 8192.0});
        const double rate = fp8 ? product_peak_ * e_.products : peak_ * other_products_;
        return 2 * M * N * K / rate * e_.software *
               (1 + e_.half_size / (4 * small) + e_.half_rows / M);
    }
    double moved(double bytes) const { return bytes / (e_.memory * cluster_.memory_bandwidth); }

    /// The forward pass of a layer, without exchanges, and the products of its weight gradients.
    struct LayerTime {
        PassTime forward = {};
        double weight_gradients = 0;
        double rounded_weights = 0;  // elements of weights in fp8
    };
    LayerTime layer_time(const LayerSpec& layer, int number) const {
        const auto M = static_cast<double>(tokens_);
        const double C = layer.n_embd, element = static_cast<double>(size_of(shape_.dtype));
        const double width = layer.attention_width(), t = shape_.mesh.size(Axis::tensor);
        // This program's tensor-parallel ranks gather what norms give, and each rounds all of it;
        // others round their rows and gather codes, as the fit takes them.
        const double of_norm = rounds_weights_ ? C : C / t;
        LayerTime of;
        PassTime& time = of.forward;
        double rounded = 0;  // elements of a token
        struct Repeated {
            double times = 1;         // products alike
            bool of_experts = false;  // each is an expert's
        };
        // inputs: elements of a token that are rounded to fp8, with gradients
        const auto add = [&](BlockProduct which, double rows, double N, double K, double inputs,
                             const Repeated& repeated = {}) {
            const bool fp8 = in_fp8(number, which);
            const bool third = fp8 && (repeated.of_experts ? fp8_experts_weight_gradients_
                                                           : fp8_weight_gradients_);
            time.products += repeated.times * product(rows, N, K, fp8);
            of.weight_gradients += repeated.times * product(rows, N, K, third);
            if (!fp8) return;
            rounded += inputs;
            of.rounded_weights += N * K * (repeated.of_experts ? layer.experts.n_expert : 1);
        };
        double hidden = layer.n_ff, up_width = layer.up_width(),
               weights = C * (layer.qkv_width() + width);
        add(qkv, M, layer.qkv_width(), C, of_norm);
        add(out, M, C, width, C / t);
        if (layer.experts) {
            const ExpertSpec& experts = layer.experts;
            const double routes = M * experts.n_expert_per_token,
                         of_expert = routes / experts.n_expert,
                         routed = double{1} * experts.n_expert_per_token * experts.n_ff,
                         share = routed / (routed + experts.n_ff_shared);
            // Grouped products reach about half of the dense speed (docs/measurements.md).
            const Repeated repeated{.times = 2.0 * experts.n_expert, .of_experts = true};
            add(up, of_expert, 2.0 * experts.n_ff, C, share * of_norm + routed, repeated);
            add(down, of_expert, C, experts.n_ff, routed, repeated);
            hidden = routed + experts.n_ff_shared;
            up_width = 2 * hidden;
            weights += 3 * C * experts.n_ff * experts.n_expert;
            if (experts.n_ff_shared > 0) {
                const double of_shared = experts.n_ff_shared;
                add(shared_up, M, 2 * of_shared, C, (1 - share) * of_norm + of_shared);
                add(shared_down, M, C, of_shared, of_shared);
            }
            // Rows are copied in the order of experts, and back.
            time.memory += moved(element * 4 * C * routes);
        } else {
            add(up, M, up_width, C, of_norm + hidden);
            add(down, M, C, hidden, hidden);
        }
        weights += C * (up_width + hidden);
        // What products read and write, and the work between them
        const double of_products =
                         M * ((4 * C) / t + layer.qkv_width() + width + up_width + hidden) +
                         weights,
                     between = M * (12 * C / t + 2 * up_width + 2 * hidden);
        time.memory += moved(element * (of_products + e_.elementwise * between));
        time.memory += moved(e_.quantisation * 3 * M * rounded);
        const double pairs = M * layer.seen_keys(shape_.config.sequence_length()),
                     ranks = shape_.mesh.size(Axis::context);
        const double T = shape_.config.sequence_length(),
                     small_heads = (1 + e_.half_head / layer.head_size) / (1 + e_.half_head / 64);
        time.attention = 4 * pairs * width / (peak_ * e_.attention) * e_.software * small_heads *
                         (1 + e_.tile / T) * (1 + e_.context_chunks * (ranks - 1) / ranks);
        time.memory += e_.launch;
        return of;
    }

    /// This program rounds weights once a step, with ZeRO-3 after each gather: an element is read,
    /// and a byte is written for each order of the codes. Other programs' casts are in their fit.
    double rounding_of_weights(const LayerTime& time) const {
        return moved((static_cast<double>(size_of(shape_.dtype)) + 2) * time.rounded_weights);
    }

    UnitWork layer_work(const LayerSpec& layer, int number) const {
        const LayerTime time = layer_time(layer, number);
        UnitWork unit;
        unit.forward = time.forward;
        const PassTime& f = unit.forward;
        unit.backward_inputs = {.products = f.products,
                                .attention = e_.attention_backward * f.attention,
                                .memory = 1.5 * (f.memory - e_.launch) + e_.launch};
        unit.backward_weights = {.products = time.weight_gradients,
                                 .memory = 0.5 * (f.memory - e_.launch) + e_.launch};
        if (shape_.recompute == Recompute::block) unit.backward_inputs += f;
        if (shape_.recompute == Recompute::elementwise)
            unit.backward_inputs.memory += 0.3 * f.memory;
        unit.backward_inputs.products += options_.again * f.products;
        if (options_.attention_again) unit.backward_inputs.attention += f.attention;
        if (rounds_weights_ && rounds_each(sharding_of(shape_, 0))) {
            const double casts = rounding_of_weights(time);
            unit.forward.memory += casts;
            unit.backward_inputs.memory += casts;
        }
        add_exchanges(unit, layer);
        if (offload_.activations) {
            const double bytes = static_cast<double>(tokens_) * layer.n_embd *
                                 static_cast<double>(size_of(shape_.dtype)) /
                                 shape_.mesh.size(Axis::tensor),
                         way = bytes / cluster_.host_link, computing = f.sum();
            unit.forward.offload = std::max(0.0, way - computing);
            if (shape_.mesh.size(Axis::pipeline) > 1 || number < layers_from_host(shape_))
                unit.backward_inputs.offload = std::max(0.0, way - 2 * computing);
        }
        return unit;
    }

    /// The axes say what they send in both passes; the forward pass has two fifths of it.
    void add_exchanges(UnitWork& unit, const LayerSpec& layer) const {
        const MeshLayout& mesh = shape_.mesh;
        const Group tensor = group_along(Axis::tensor, mesh),
                    context = group_along(Axis::context, mesh);
        const auto split = [&](double seconds, double PassTime::*kind) {
            unit.forward.*kind += 0.4 * seconds;
            unit.backward_inputs.*kind += 0.6 * seconds;
        };
        if (tensor.ranks > 1 && !is_free(Axis::tensor)) {
            TensorTraffic of_layer = tensor_traffic(shape_, tokens_, halves_apart_);
            of_layer.layers = 1;
            of_layer.layers_with_sums = layer.qk_norm == QkNormKind::width;
            of_layer.has_embedding = of_layer.has_head = false;
            const int64_t sent = tensor_bytes_sent(of_layer);
            // A layer has 8 to 13 exchanges, by recomputation, kept rows and halves. The tables'
            // efficiencies were fitted with 9.
            constexpr int exchanges = 9;
            const double of_one = static_cast<double>(sent) / exchanges;
            const int chunks = shape_.config.parallel.tensor_chunks;
            const double exposed =
                options_.software == Software::own ? 1.0 / chunks : e_.tensor_exposed;
            split(exposed * exchanges *
                      (of_one / cluster_.bus_bandwidth(of_one * tensor.ranks / (tensor.ranks - 1),
                                                       tensor.ranks, tensor.stride) +
                       cluster_.latency(tensor.ranks, tensor.stride)),
                  &PassTime::tensor);
        }
        if (context.ranks > 1 && !is_free(Axis::context)) {
            const int64_t sent = context_bytes_sent(tokens_ * context.ranks * 2 * layer.kv_width(),
                                                    shape_.dtype, context.ranks);
            const double exposed = options_.software == Software::own ? 1 : e_.context_exposed;
            split(exposed * (static_cast<double>(sent) /
                                 cluster_.bus_bandwidth(static_cast<double>(sent), context.ranks,
                                                        context.stride) +
                             3 * cluster_.latency(context.ranks, context.stride)),
                  &PassTime::context);
        }
    }

    /// The head and the loss: products in bf16, and passes over the logits.
    UnitWork head_work() const {
        const auto M = static_cast<double>(tokens_);
        const double t = shape_.mesh.size(Axis::tensor),
                     V = static_cast<double>(shape_.spec.vocab_size) / t;
        UnitWork unit;
        unit.forward.products = product(M, V, shape_.spec.n_embd, false);
        unit.forward.memory = moved(e_.logits * M * V);
        unit.backward_inputs.products = unit.backward_weights.products = unit.forward.products;
        return unit;
    }

    RankWork rank_work(const Registry& whole, int rank) {
        const RankRegistry registry = registry_of_rank(shape_, whole, rank);
        Arena counting = Arena::counting(Device{});
        const ParameterBuffers buffers(counting, registry.parameters, shape_.dtype,
                                       ParameterBuffers::Use::training, sharding_of(shape_, rank));
        std::vector<UnitWork> units(static_cast<size_t>(buffers.units()));
        add_state(units, buffers);
        RankWork work;
        for (const Registry& stage : registry.stages) {
            for (int l = 0; l < static_cast<int>(stage.blocks.size()); ++l)
                units[static_cast<size_t>(stage.unit_of_block(l))].layer = stage.first_layer + l;
            if (stage.ends_model())
                units[static_cast<size_t>(stage.unit_of(stage.final_norm_w))].has_head = true;
            work.stages.emplace_back(units.begin() + stage.first_unit(),
                                     units.begin() + stage.last_unit() + 1);
        }
        add_end(work, buffers, rank);
        return work;
    }

    static void add_work(UnitWork& to, const UnitWork& work) {
        to.forward += work.forward;
        to.backward_inputs += work.backward_inputs;
        to.backward_weights += work.backward_weights;
    }

    /// The distance between ranks of a group that adds gradients, along its nearest axis.
    int stride_of(SumOver over, const Sharding& sharding) const {
        const Axes axes = axes_of(over, sharding);
        return shape_.mesh.stride(over == SumOver::ends ? Axis::pipeline : std::max(axes));
    }

    /// What the data axis exchanges of each unit's weights and gradients.
    void add_state(std::vector<UnitWork>& units, const ParameterBuffers& buffers) const {
        const Sharding& s = buffers.sharding();
        const std::vector<Bucket>& buckets = buffers.layout().buckets();
        const auto unit_of = [&](size_t bucket) -> UnitWork& {
            return units[static_cast<size_t>(buckets[bucket].first_unit)];
        };
        if (s.size > 1 && s.is_split())
            for (size_t b = 0; b < buckets.size(); ++b)
                unit_of(b).gather +=
                    collective(static_cast<double>(buckets[b].range.n) *
                                   static_cast<double>(size_of(shape_.dtype)),
                               {s.size, stride_of(SumOver::shards, s)}, Axis::data);
        for (const GradientSum& sum : gradient_sums(buffers.layout(), buffers.parameters(), s)) {
            const double seconds = collective(
                static_cast<double>(sum.bytes_moved()) * e_.gradient_bytes / 4,
                {static_cast<int>(sum.ranks), stride_of(sum.over, s)}, axis_of_exchange(sum.over));
            UnitWork& unit = unit_of(sum.first_bucket);
            (sum.every_micro_batch ? unit.reduce_each : unit.reduce_once) += seconds;
        }
    }

    /// What follows the last gradient: sums, the optimizer's passes, and state in the host's
    /// memory, which comes and goes at the same time.
    void add_end(RankWork& work, const ParameterBuffers& buffers, int rank) const {
        const UpdateBytes bytes = update_bytes(buffers, shape_);
        work.optimizer = moved(bytes.moved);
        if (rounds_weights_ && !rounds_each(buffers.sharding()))
            for (const std::vector<UnitWork>& stage : work.stages)
                for (const UnitWork& unit : stage)
                    if (unit.layer >= 0)
                        work.optimizer +=
                            rounding_of_weights(layer_time(part_.layer(unit.layer), unit.layer));
        if (offload_.optimizer) work.offload = bytes.state / cluster_.host_link;
        const double flops = muon_flops(shape_, rank);
        if (flops > 0) {
            // With matrices as wide as the model. An iteration is a chain of small kernels.
            const double small = std::min(shape_.spec.n_embd, 8192);
            work.muon = flops / (peak_ * other_products_) * (1 + 3 * e_.half_size / small);
            work.optimizer += work.muon;
        }
        if (shape_.mesh.world() > 1) work.sums = 2 * cluster_.latency(shape_.mesh.world(), 1);
    }

    const RunShape& shape_;
    const Cluster& cluster_;
    const WorkOptions& options_;
    Efficiencies e_;
    DecoderSpec part_;
    int64_t tokens_;  // of a micro-batch on this rank
    double peak_, product_peak_;
    double other_products_ = 0;  // share of the peak that products beside fp8 reach
    Offload offload_;
    bool halves_apart_ = false;
    // For each layer; empty: none is.
    std::vector<std::array<bool, block_products>> in_fp8_;
    bool fp8_weight_gradients_ = true, fp8_experts_weight_gradients_ = true;
    bool rounds_weights_ = false;  // as this program does
};

}  // namespace

StepWork step_work(const RunShape& shape, const Cluster& cluster, const WorkOptions& options) {
    return WorkBuilder(shape, cluster, options).work();
}

void time_passes(StepWork& work, const RunShape& shape, const Cluster& cluster,
                 const WorkOptions& options) {
    WorkBuilder(shape, cluster, options).time_passes(work);
}

}  // namespace train_gpt
