// The operations of the embedding: operations.h says what each entry means.
#include "kernels/embedding.h"
#include "test/compare/operations.h"
#include "test/kernels/reference.h"

namespace train_gpt::compare {

namespace {

EmbeddingRows embedding_rows(const Operands& o) {
    return {.T = o['T'], .C = o['C'], .tokens = o.integer_values("tokens")};
}

Values wte_zeros(const Operands& o) { return Values(static_cast<size_t>(o['V'] * o['C'])); }
Values wpe_zeros(const Operands& o) { return Values(static_cast<size_t>(o['T'] * o['C'])); }

/// dwte before the call: the head's share where the head is tied, else nothing.
Values dwte_before(const Operands& o) {
    const Values before = o.values("dwte");
    return before.empty() ? wte_zeros(o) : before;
}

size_t embedding_scratch(const Stream& stream, const Operands& o) {
    return embedding_scratch_bytes(stream, o['B'] * o['T'], o['V']);
}

void run_embedding_backward(Stream& stream, const Call& c, bool tied) {
    embedding_backward(stream, {.dwte = c.sink("dwte", tied),
                                .dwpe = c.sink("dwpe"),
                                .dout = c["dout"],
                                .tokens = c.data<int32_t>("tokens"),
                                .vocab_rows = c['V'],
                                .n_ctx = c['T']});
}

Results embedding_backward_references(const Operands& o) {
    Values dwte = dwte_before(o), dwpe = wpe_zeros(o);
    embedding_backward_reference<double>(embedding_rows(o), o.values("dout"), dwte, dwpe);
    return {{"dwte", dwte}, {"dwpe", dwpe}};
}

/// Σ dout ⊙ (wte[token] + wpe[position]) + Σ (dwte before the call) ⊙ wte, linear in both tables.
double embedding_loss(const Operands& o, const Values& wte, const Values& wpe) {
    return dot(o.values("dout"), embedding_forward_reference(embedding_rows(o), wte, wpe)) +
           dot(dwte_before(o), wte);
}

const Derivative of_wte{
    .gradient = "dwte", .point = wte_zeros, .loss = [](const Operands& o, const Values& wte) {
        return embedding_loss(o, wte, wpe_zeros(o));
    }};
const Derivative of_wpe{
    .gradient = "dwpe", .point = wpe_zeros, .loss = [](const Operands& o, const Values& wpe) {
        return embedding_loss(o, wte_zeros(o), wpe);
    }};

}  // namespace

std::vector<Operation> embedding_operations() {
    return {
        {.name = "embedding_forward",
         .computes = "out = wte[token] + wpe[position]",
         .letters = {batch, sequence, letter('C', 768, 768), letter('V', 1000, 50257)},
         .declare =
             [](Operands& o) {
                 o.integers("tokens", {o['B'] * o['T']}, o['V']);
                 o.normal("wte", {o['V'], o['C']});
                 o.normal("wpe", {o['T'], o['C']});
                 o.result("out", {o['B'], o['T'], o['C']}, o.dtype(), {.roundings = 1});
             },
         .run =
             [](Stream& stream, const Call& c) {
                 embedding_forward(stream, {.out = c["out"],
                                            .tokens = c.data<int32_t>("tokens"),
                                            .wte = c["wte"],
                                            .wpe = c["wpe"]});
             },
         .reference = [](const Operands& o) -> Results {
             return {{"out", embedding_forward_reference(embedding_rows(o), o.values("wte"),
                                                         o.values("wpe"))}};
         }},
        {.name = "embedding_backward",
         .computes = "dwte[token] += dout, dwpe[position] = Σ_batch dout",
         .letters = {batch, sequence, letter('C', 768, 768), letter('V', 1000, 50257)},
         .declare =
             [](Operands& o) {
                 o.integers("tokens", {o['B'] * o['T']}, o['V']);
                 o.normal("dout", {o['B'], o['T'], o['C']});
                 o.normal("dwte", {o['V'], o['C']}, DType::fp32);
                 o.changes("dwte", {.terms = o['B'] * o['T']});
                 o.result("dwpe", {o['T'], o['C']}, DType::fp32, {.terms = o['B']});
             },
         .scratch_bytes = embedding_scratch,
         .run = [](Stream& stream, const Call& c) { run_embedding_backward(stream, c, true); },
         .reference = embedding_backward_references,
         .derivatives = {of_wte, of_wpe}},
        {.name = "embedding_backward_untied",
         .computes = "dwte[token] = Σ dout, 0 for other tokens; dwpe[position] = Σ_batch dout",
         .letters = {batch, sequence, letter('C', 768, 768), letter('V', 1000, 50257)},
         .declare =
             [](Operands& o) {
                 o.integers("tokens", {o['B'] * o['T']}, o['V']);
                 o.normal("dout", {o['B'], o['T'], o['C']});
                 o.result("dwte", {o['V'], o['C']}, DType::fp32, {.terms = o['B'] * o['T']});
                 o.result("dwpe", {o['T'], o['C']}, DType::fp32, {.terms = o['B']});
             },
         .scratch_bytes = embedding_scratch,
         .run = [](Stream& stream, const Call& c) { run_embedding_backward(stream, c, false); },
         .reference = embedding_backward_references,
         .derivatives = {of_wte, of_wpe}},
    };
}

}  // namespace train_gpt::compare
