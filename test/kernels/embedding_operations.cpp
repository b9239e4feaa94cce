// The operations of the embedding: operations.h says what each entry means.
#include "kernels/embedding.h"
#include "test/compare/operations.h"
#include "test/kernels/reference.h"

namespace train_gpt::compare {

namespace {

EmbeddingRows embedding_rows(const Operands& o) {
    return {.T = o['T'], .C = o['C'], .tokens = o.integer_values("tokens")};
}

Values w_zeros(const Operands& o) { return Values(static_cast<size_t>(o['V'] * o['C'])); }
Values positions_zeros(const Operands& o) { return Values(static_cast<size_t>(o['T'] * o['C'])); }

/// dw before the call: the head's share where the head is tied, else nothing.
Values dwte_before(const Operands& o) {
    const Values before = o.values("dw");
    return before.empty() ? w_zeros(o) : before;
}

size_t embedding_scratch(const Stream& stream, const Operands& o) {
    return embedding_scratch_bytes(stream, o['B'] * o['T'], o['V']);
}

void run_embedding_backward(Stream& stream, const Call& c, bool tied) {
    embedding_backward(stream, {.dw = c.sink("dw", tied),
                                .dpositions = c.sink("dpositions"),
                                .dout = c["dout"],
                                .tokens = c.data<int32_t>("tokens"),
                                .vocab_rows = c['V'],
                                .n_ctx = c['T']});
}

Results embedding_backward_references(const Operands& o) {
    Values dw = dwte_before(o), dpositions = positions_zeros(o);
    embedding_backward_reference<double>(embedding_rows(o), o.values("dout"), dw, dpositions);
    return {{"dw", dw}, {"dpositions", dpositions}};
}

/// Σ dout ⊙ (w[token] + positions[position]) + Σ (dw before the call) ⊙ w, linear in both tables.
double embedding_loss(const Operands& o, const Values& w, const Values& positions) {
    return dot(o.values("dout"), embedding_forward_reference(embedding_rows(o), w, positions)) +
           dot(dwte_before(o), w);
}

const Derivative of_wte{
    .gradient = "dw", .point = w_zeros, .loss = [](const Operands& o, const Values& w) {
        return embedding_loss(o, w, positions_zeros(o));
    }};
const Derivative of_wpe{.gradient = "dpositions",
                        .point = positions_zeros,
                        .loss = [](const Operands& o, const Values& positions) {
                            return embedding_loss(o, w_zeros(o), positions);
                        }};

}  // namespace

std::vector<Operation> embedding_operations() {
    return {
        {.name = "embedding_forward",
         .computes = "out = w[token] + positions[position]",
         .letters = {batch, sequence, letter('C', 768, 768), letter('V', 1000, 50257)},
         .declare =
             [](Operands& o) {
                 o.integers("tokens", {o['B'] * o['T']}, o['V']);
                 o.normal("w", {o['V'], o['C']});
                 o.normal("positions", {o['T'], o['C']});
                 o.result("out", {o['B'], o['T'], o['C']}, o.dtype(), {.roundings = 1});
             },
         .run =
             [](Stream& stream, const Call& c) {
                 embedding_forward(stream, {.out = c["out"],
                                            .tokens = c.data<int32_t>("tokens"),
                                            .w = c["w"],
                                            .positions = c["positions"]});
             },
         .reference = [](const Operands& o) -> Results {
             return {{"out", embedding_forward_reference(embedding_rows(o), o.values("w"),
                                                         o.values("positions"))}};
         }},
        {.name = "embedding_backward",
         .computes = "dw[token] += dout, dpositions[position] = Σ_batch dout",
         .letters = {batch, sequence, letter('C', 768, 768), letter('V', 1000, 50257)},
         .declare =
             [](Operands& o) {
                 o.integers("tokens", {o['B'] * o['T']}, o['V']);
                 o.normal("dout", {o['B'], o['T'], o['C']});
                 o.normal("dw", {o['V'], o['C']}, DType::fp32);
                 o.changes("dw", {.terms = o['B'] * o['T']});
                 o.result("dpositions", {o['T'], o['C']}, DType::fp32, {.terms = o['B']});
             },
         .scratch_bytes = embedding_scratch,
         .run = [](Stream& stream, const Call& c) { run_embedding_backward(stream, c, true); },
         .reference = embedding_backward_references,
         .derivatives = {of_wte, of_wpe}},
        {.name = "embedding_backward_untied",
         .computes = "dw[token] = Σ dout, 0 for other tokens; dpositions[position] = Σ_batch dout",
         .letters = {batch, sequence, letter('C', 768, 768), letter('V', 1000, 50257)},
         .declare =
             [](Operands& o) {
                 o.integers("tokens", {o['B'] * o['T']}, o['V']);
                 o.normal("dout", {o['B'], o['T'], o['C']});
                 o.result("dw", {o['V'], o['C']}, DType::fp32, {.terms = o['B'] * o['T']});
                 o.result("dpositions", {o['T'], o['C']}, DType::fp32, {.terms = o['B']});
             },
         .scratch_bytes = embedding_scratch,
         .run = [](Stream& stream, const Call& c) { run_embedding_backward(stream, c, false); },
         .reference = embedding_backward_references,
         .derivatives = {of_wte, of_wpe}},
    };
}

}  // namespace train_gpt::compare
