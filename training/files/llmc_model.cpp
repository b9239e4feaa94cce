#include "training/files/llmc_model.h"

#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "base/dtype.h"
#include "base/error.h"
#include "base/file.h"
#include "model/families/gpt2.h"

namespace train_gpt {

namespace fs = std::filesystem;

namespace {

constexpr size_t header_ints = 256, header_bytes = header_ints * sizeof(int32_t);
constexpr int32_t magic = 20240326, fp32_version = 3, bf16_version = 5;
enum Header {
    at_magic,
    at_version,
    at_n_ctx,
    at_vocab,
    at_layers,
    at_heads,
    at_channels,
    at_padded,
    at_history = 248  // llm.c leaves it 0
};

/// The parameters in the order of the file, which stacks parameters of one kind over the layers.
std::vector<Parameter> in_file_order(const DecoderSpec& spec) {
    using P = BlockParameters;
    const Registry r = registry_of(spec);
    std::vector<int> order{r.tokens, r.positions};
    for (const auto member : {&P::norm1_w, &P::norm1_b, &P::qkv_w, &P::qkv_b, &P::out_w, &P::out_b,
                              &P::norm2_w, &P::norm2_b, &P::up_w, &P::up_b, &P::down_w, &P::down_b})
        for (const BlockParameters& block : r.blocks) order.push_back(block.*member);
    order.insert(order.end(), {r.final_norm_w, r.final_norm_b});
    std::vector<Parameter> ordered;
    for (const int i : order) ordered.push_back(r.parameters[static_cast<size_t>(i)]);
    return ordered;
}

/// The bytes of hex digits; none if there are other characters.
std::vector<std::byte> bytes_of_hex(const std::string& text) {
    constexpr std::string_view digits = "0123456789abcdef";
    std::vector<std::byte> bytes;
    for (size_t i = 0; i + 1 < text.size(); i += 2) {
        const size_t high = digits.find(text[i]), low = digits.find(text[i + 1]);
        if (high == digits.npos || low == digits.npos) return {};
        bytes.push_back(static_cast<std::byte>(high << 4 | low));
    }
    return bytes;
}

}  // namespace

StoredModel open_llmc_model(const fs::path& path) {
    const auto file = std::make_shared<const MappedFile>(path);
    const std::span<const std::byte> bytes = file->bytes();
    int32_t header[header_ints] = {};
    if (bytes.size() >= header_bytes) std::memcpy(header, bytes.data(), header_bytes);
    if (header[at_magic] != magic)
        throw Error(path.string(), " is not a model file of llm.c (they begin with ", magic,
                    "); name such a file, or the folder of a Hugging Face model");
    const int32_t version = header[at_version];
    if (version != fp32_version && version != bf16_version)
        throw Error(path.string(), " is a model file of llm.c's version ", version,
                    "; only version ", fp32_version, " (fp32) and ", bf16_version,
                    " (bf16) are supported");
    const DecoderSpec spec = gpt2.spec({.n_layer = header[at_layers],
                                        .n_head = header[at_heads],
                                        .n_embd = header[at_channels],
                                        .n_ctx = header[at_n_ctx],
                                        .vocab_size = header[at_vocab]},
                                       path.string());
    const int64_t padded = header[at_padded];
    if (padded < spec.vocab_size || padded > 2 * int64_t{1 << 24})
        throw Error(path.string(), " has ", padded, " rows for a vocabulary of ", spec.vocab_size,
                    "; its header is damaged, so copy it again");

    StoredModel model{.spec = spec,
                      .dtype = version == fp32_version ? StoredType::fp32 : StoredType::bf16,
                      .tokens = token_ids_of(nullptr),
                      .read = {}};
    const size_t element = size_of(model.dtype);
    std::map<std::string, uint64_t> offsets;  // in bytes
    uint64_t end = header_bytes;
    for (const Parameter& p : in_file_order(spec)) {
        offsets[p.name] = end;
        const bool embedding = end == header_bytes;  // the first one
        end += static_cast<uint64_t>(embedding ? padded * spec.n_embd : p.numel()) * element;
    }
    if (bytes.size() != end)
        throw Error(path.string(), " has ", bytes.size(), " bytes, but its header requires ", end,
                    "; it is damaged or incomplete, so copy it again");

    model.read = [file, offsets, element](const Parameter& p, int64_t first,
                                          std::span<float> values) {
        const std::byte* from =
            file->bytes().data() + offsets.at(p.name) + static_cast<uint64_t>(first) * element;
        if (element == sizeof(float)) {
            std::memcpy(values.data(), from, values.size_bytes());
            return;
        }
        for (float& value : values) {
            bf16 half;
            std::memcpy(&half, from, sizeof half);
            value = to_float(half);
            from += sizeof half;
        }
    };
    return model;
}

void write_llmc_model(const fs::path& path, const StoredModel& model, StoredType dtype,
                      const std::string& history) {
    if (dtype == StoredType::fp16)
        throw Error("llm.c's model files hold fp32 or bf16, not fp16; choose one with --dtype");
    const DecoderSpec& spec = model.spec;
    if (spec.family != &gpt2)
        throw Error("llm.c's model files hold GPT-2, and this model is ",
                    with_article(*spec.family), "; export it with --format huggingface");
    if (spec.mlp != Mlp::gelu)
        throw Error(
            "llm.c's model files hold GPT-2 with GELU, and this model has mlp = relu2; export it "
            "with --format huggingface");
    int32_t header[header_ints] = {};
    header[at_magic] = magic;
    header[at_version] = dtype == StoredType::fp32 ? fp32_version : bf16_version;
    header[at_n_ctx] = spec.n_ctx;
    header[at_vocab] = static_cast<int32_t>(spec.vocab_size);
    header[at_layers] = spec.n_layer;
    header[at_heads] = spec.n_head;
    header[at_channels] = spec.n_embd;
    header[at_padded] = static_cast<int32_t>(spec.padded_vocab());
    const std::vector<std::byte> hash = bytes_of_hex(history);
    if (hash.size() == (header_ints - at_history) * sizeof(int32_t))
        std::memcpy(header + at_history, hash.data(), hash.size());
    AtomicFile file(path);
    file.write(std::as_bytes(std::span(header)));
    const std::vector<Parameter> parameters = in_file_order(spec);
    for (const Parameter& p : parameters) {
        write_parameter(model, p, {0, p.rows()}, dtype, {},
                        [&](std::span<const std::byte> bytes) { file.write(bytes); });
        if (&p == &parameters.front())
            file.write(std::vector<std::byte>(
                static_cast<size_t>((spec.padded_vocab() - spec.vocab_size) * spec.n_embd) *
                size_of(dtype)));
    }
    file.commit();
}

}  // namespace train_gpt
