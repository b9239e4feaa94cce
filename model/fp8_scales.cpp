#include "model/fp8_scales.h"

#include <algorithm>
#include <cassert>
#include <cstring>
#include <map>
#include <string_view>

#include "base/error.h"
#include "device/copy.h"
#include "kernels/fp8_math.h"

namespace train_gpt {

namespace {

/// A tile of tensor cores is twice as wide.
constexpr int64_t least_width = 64;
/// The room of Fp8Found in front of the ring, so that the ring is aligned.
constexpr size_t found_bytes = 64;
static_assert(sizeof(Fp8Found) <= found_bytes);

struct ProductName {
    const char* word;
    int BlockParameters::*weight;
};
constexpr ProductName product_names[] = {{"qkv", &BlockParameters::qkv_w},
                                         {"out", &BlockParameters::out_w},
                                         {"up", &BlockParameters::up_w},
                                         {"down", &BlockParameters::down_w},
                                         {"shared_up", &BlockParameters::shared_up_w},
                                         {"shared_down", &BlockParameters::shared_down_w}};

bool skips(std::string_view entry, int layer, const char* word) {
    const std::string number = std::to_string(layer);
    return entry == word || entry == number || entry == concat(number, ".", word);
}

bool is_of_experts(const Parameter& weight) { return weight.matrix_rows > 0; }

/// Why a product stays in the run's dtype; empty if it does not.
std::string reason_for(const Parameter& weight, bool is_skipped, int tensor_ranks,
                       int64_t tokens_of_sequence) {
    if (is_skipped) return "named in precision.fp8_skip";
    const Parameter part = parameter_held_by(weight, {0, tensor_ranks});
    const int64_t matrices = is_of_experts(weight) ? weight.padded[0] / weight.matrix_rows : 1,
                  outputs = part.padded[0] / matrices, inputs = part.padded[1];
    const auto has = [&](int64_t n, const char* of) {
        return concat(n, " ", of, tensor_ranks > 1 ? " on a rank" : "");
    };
    for (const auto& [n, of] : {std::pair{inputs, "inputs"}, {outputs, "outputs"}}) {
        if (n < least_width) return concat(has(n, of), " are fewer than ", least_width);
        if (n % fp8_multiple != 0)
            return concat(has(n, of), " are not a multiple of ", fp8_multiple);
    }
    if (tokens_of_sequence % fp8_multiple != 0)
        return concat("the ", tokens_of_sequence,
                      " tokens that a rank has of a sequence are not a ", "multiple of ",
                      fp8_multiple);
    return "";
}

}  // namespace

std::vector<Fp8Product> products_of(const Registry& whole, const Fp8Options& options,
                                    int tensor_ranks, int64_t tokens_of_sequence) {
    std::vector<Fp8Product> products;
    if (options.recipe == Fp8Recipe::off) return products;
    for (size_t l = 0; l < whole.blocks.size(); ++l) {
        const int layer = whole.first_layer + static_cast<int>(l);
        const BlockParameters& block = whole.blocks[l];
        for (const auto& [word, member] : product_names) {
            if (block.*member < 0) continue;
            const Parameter& weight = whole.parameters[static_cast<size_t>(block.*member)];
            const bool is_skipped = std::ranges::any_of(
                options.skip, [&](const std::string& entry) { return skips(entry, layer, word); });
            products.push_back(
                {.name = concat(layer, ".", word),
                 .weight = weight.name,
                 .id = weight.id,
                 .reason = reason_for(weight, is_skipped, tensor_ranks, tokens_of_sequence),
                 .of_experts = is_of_experts(weight)});
        }
    }
    return products;
}

std::string skip_problem(const std::vector<std::string>& skip, const Registry& whole) {
    std::string words;  // that this model's blocks have
    for (const auto& [word, member] : product_names)
        if (std::ranges::any_of(whole.blocks, [m = member](const auto& of) { return of.*m >= 0; }))
            words += concat(words.empty() ? "" : ", ", word);
    const auto is_named = [&](const std::string& entry) {
        for (size_t layer = 0; layer < whole.blocks.size(); ++layer)
            for (const auto& [word, member] : product_names)
                if (whole.blocks[layer].*member >= 0 && skips(entry, static_cast<int>(layer), word))
                    return true;
        return false;
    };
    for (const std::string& entry : skip)
        if (!is_named(entry))
            return concat("precision.fp8_skip has \"", entry,
                          "\", which names no product of this model; write a layer (0 to ",
                          whole.blocks.size() - 1, "), a product (", words,
                          "), or a product of a layer (\"0.down\")");
    return "";
}

std::string described(const std::vector<Fp8Product>& products, const Fp8Options& options,
                      DType dtype) {
    constexpr size_t most_names = 6;
    std::vector<std::string> reasons;
    std::map<std::string, std::vector<std::string>> names;
    for (const Fp8Product& product : products) {
        if (product.is_fp8()) continue;
        if (!names.contains(product.reason)) reasons.push_back(product.reason);
        names[product.reason].push_back(product.name);
    }
    const auto others = std::ranges::count_if(
        products, [](const Fp8Product& product) { return !product.is_fp8(); });
    std::string text = concat(
        "fp8 (", options.recipe == Fp8Recipe::delayed ? "delayed" : "current",
        " scaling): ", std::ssize(products) - others, " of ", products.size(),
        " products of blocks",
        !options.weight_gradient ? concat(", their weight gradients in ", name_of(dtype))
        : std::ranges::any_of(
              products,
              [](const Fp8Product& product) { return product.of_experts && product.is_fp8(); })
            ? concat(", weight gradients of experts in ", name_of(dtype))
            : "");
    for (const std::string& reason : reasons) {
        const std::vector<std::string>& of = names[reason];
        text += concat("; in ", name_of(dtype), ": ");
        for (size_t i = 0; i < std::min(of.size(), most_names); ++i)
            text += (i > 0 ? ", " : "") + of[i];
        if (of.size() > most_names) text += concat(" and ", of.size() - most_names, " more");
        text += concat(" (", reason, ")");
    }
    return text;
}

int64_t Fp8Scales::operands(const std::vector<Fp8Product>& products) {
    return 3 * std::ranges::count_if(products, &Fp8Product::is_fp8);
}

Fp8Scales::Fp8Scales(const Fp8Options& options, const std::vector<Fp8Product>& products,
                     const std::vector<Parameter>& held, Arena& arena)
    : n_(operands(products)),
      delayed_(options.recipe == Fp8Recipe::delayed),
      device_(arena.device()) {
    if (n_ == 0) return;
    const auto floats = [&](int64_t n) {
        return static_cast<float*>(
            arena.take(static_cast<size_t>(n) * sizeof(float), Purpose::workspaces));
    };
    state_ = static_cast<std::byte*>(arena.take(history_bytes(), Purpose::workspaces));
    amax_ = floats(n_);
    scale_ = delayed_ ? floats(n_) : nullptr;
    inverse_ = delayed_ ? floats(n_ / 3 * fp8_inverse_stride) : nullptr;
    host_ = static_cast<Fp8Found*>(arena.take(2 * sizeof(Fp8Found), Purpose::staging));

    operands_.resize(static_cast<size_t>(n_));
    products_.assign(held.size(), -1);
    int64_t i = 0;
    for (const Fp8Product& product : products) {
        if (!product.is_fp8()) continue;
        // In the order in which a step reads them, since an operand that is not finite makes later
        // ones so: forward, input and weight of each product; backward, the gradients in reverse.
        const int64_t x = 2 * i, w = 2 * i + 1, dy = n_ - 1 - i;
        const auto scaling = [&](int64_t operand, const char* what) {
            operands_[static_cast<size_t>(operand)] = concat(what, " of ", product.name);
            return Fp8Scaling{.scale = delayed_ ? scale_ + operand : nullptr,
                              .amax = amax_ + operand};
        };
        scales_.push_back({.x = scaling(x, "input"),
                           .w = scaling(w, "weight"),
                           .dy = scaling(dy, "gradient"),
                           .weight_gradient = options.weight_gradient && !product.of_experts,
                           .name = product.name});
        if (delayed_) scales_.back().x.inverse = inverse_ + i * fp8_inverse_stride;
        const auto found = std::ranges::find(held, product.id, &Parameter::id);
        if (found != held.end())
            products_[static_cast<size_t>(found - held.begin())] = static_cast<int>(i);
        ++i;
    }
    if (!arena.is_counting()) set_history({});
}

size_t Fp8Scales::history_bytes() const {
    const int64_t elements = delayed_ ? history_steps * n_ : 0;
    return found_bytes + static_cast<size_t>(elements) * sizeof(float);
}

void Fp8Scales::set_known(bool known) {
    for (ProductScales& scales : scales_)
        scales.x.is_set = scales.w.is_set = scales.dy.is_set = known && delayed_;
}

std::vector<const ProductScales*> Fp8Scales::of_parameters(size_t held) const {
    std::vector<const ProductScales*> all;
    for (size_t i = 0; i < held; ++i) all.push_back(of(static_cast<int>(i)));
    return all;
}

bool Fp8Scales::set_for_warm_up() {
    if (n_ == 0 || !delayed_) return false;
    const std::vector<float> ones(static_cast<size_t>(n_), 1.0f);
    copy_now(device_, scale_, ones.data(), ones.size() * sizeof(float));
    set_known(true);
    return true;
}

void Fp8Scales::begin_step(Stream& stream) {
    if (n_ > 0) clear(stream, amax_, static_cast<size_t>(n_) * sizeof(float));
}

void Fp8Scales::add_over_ranks(Stream& stream, ParameterStore& parameters) {
    if (n_ > 0) parameters.reduce_over_ranks(stream, amax_, n_, DType::fp32, Reduction::max);
}

void Fp8Scales::finish_step(Stream& stream, const StepState* state) {
    if (n_ == 0) return;
    fp8_update(stream,
               {.history = reinterpret_cast<float*>(state_ + found_bytes),
                .scale = scale_,
                .amax = amax_,
                .found = reinterpret_cast<Fp8Found*>(state_),
                .H = history_steps,
                .n = n_,
                .e4m3_count = n_ / 3 * 2},
               state);
}

void Fp8Scales::copy_to_host(Stream& stream, int place) {
    if (n_ > 0) copy(stream, host_ + place, state_, sizeof(Fp8Found));
}

Fp8Found Fp8Scales::found(int place) {
    if (n_ == 0) return {};
    set_known(host_[place].steps > 0 && host_[place].unset == 0);
    return host_[place];
}

std::span<const std::byte> Fp8Scales::on_device() const {
    return {state_, n_ > 0 ? history_bytes() : 0};
}

Fp8History Fp8Scales::history() const {
    if (n_ == 0) return {};
    std::vector<std::byte> copied(history_bytes());
    copy_now(device_, copied.data(), state_, copied.size());
    return history_in(copied.data());
}

Fp8History Fp8Scales::history_in(const std::byte* copied) const {
    if (n_ == 0 || !delayed_) return {};
    Fp8Found found;
    std::memcpy(&found, copied, sizeof found);
    Fp8History history{.operands = operands_};
    const size_t row = static_cast<size_t>(n_) * sizeof(float);
    const int64_t taken = std::min(found.steps, history_steps);
    history.amax.resize(static_cast<size_t>(taken * n_));
    for (int64_t i = 0; i < taken; ++i) {
        const int64_t place = (found.steps - taken + i) % history_steps;
        std::memcpy(history.amax.data() + i * n_,
                    copied + found_bytes + static_cast<size_t>(place) * row, row);
    }
    return history;
}

void Fp8Scales::set_history(const Fp8History& history) {
    if (n_ == 0) return;
    assert(history.amax.empty() || history.operands == operands_);
    const int64_t steps = std::ssize(history.amax) / n_;
    assert(steps <= history_steps);
    Fp8Found found{.steps = steps};
    // As fp8_update() does.
    std::vector<float> scales(static_cast<size_t>(n_));
    for (int64_t i = 0; steps > 0 && i < n_; ++i) {
        float most = 0;
        for (int64_t step = 0; step < steps; ++step)
            most = std::max(most, history.amax[static_cast<size_t>(step * n_ + i)]);
        scales[static_cast<size_t>(i)] =
            fp8_delayed_scale(most, i < n_ / 3 * 2 ? E4M3::largest : E5M2::largest);
    }
    if (delayed_) found.unset = static_cast<int32_t>(std::ranges::count(scales, 0.0f));
    copy_now(device_, state_, &found, sizeof found);
    set_known(false);  // the next step's outcome shows
    if (!delayed_) return;
    if (steps > 0)
        copy_now(device_, state_ + found_bytes, history.amax.data(),
                 history.amax.size() * sizeof(float));
    copy_now(device_, scale_, scales.data(), scales.size() * sizeof(float));
}

}  // namespace train_gpt
