#include "training/llmc_model.h"

#include <cstring>
#include <map>
#include <memory>

#include "base/dtype.h"
#include "base/error.h"
#include "base/file.h"

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
    at_padded
};

/// Hugging Face's names of the 16 tensors in the order of the file.
constexpr const char* before_blocks[] = {"wte.weight", "wpe.weight"};
constexpr const char* of_each_block[] = {
    "ln_1.weight",        "ln_1.bias",        "attn.c_attn.weight", "attn.c_attn.bias",
    "attn.c_proj.weight", "attn.c_proj.bias", "ln_2.weight",        "ln_2.bias",
    "mlp.c_fc.weight",    "mlp.c_fc.bias",    "mlp.c_proj.weight",  "mlp.c_proj.bias"};
constexpr const char* behind_blocks[] = {"ln_f.weight", "ln_f.bias"};

/// The parameters in the order of the file.
std::vector<Parameter> in_file_order(const GPTShape& shape) {
    std::map<std::string, Parameter> by_name;
    for (const Parameter& p : gpt_parameters(shape)) by_name.emplace(p.name, p);
    std::vector<Parameter> ordered;
    for (const char* name : before_blocks) ordered.push_back(by_name.at(name));
    for (const char* name : of_each_block)
        for (int layer = 0; layer < shape.n_layer; ++layer)
            ordered.push_back(by_name.at(concat("h.", layer, ".", name)));
    for (const char* name : behind_blocks) ordered.push_back(by_name.at(name));
    return ordered;
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
    const GPTShape shape = checked_shape(path.string(), header[at_layers], header[at_heads],
                                         header[at_channels], header[at_n_ctx], header[at_vocab]);
    const int64_t padded = header[at_padded];
    if (padded < shape.vocab_size || padded > 2 * int64_t{1 << 24})
        throw Error(path.string(), " has ", padded, " rows for a vocabulary of ", shape.vocab_size,
                    "; its header is damaged, so copy it again");

    StoredModel model{.shape = shape,
                      .dtype = version == fp32_version ? StoredType::fp32 : StoredType::bf16,
                      .end_of_text = {},
                      .read = {}};
    const size_t element = size_of(model.dtype);
    std::map<std::string, uint64_t> offsets;  // in bytes
    uint64_t end = header_bytes;
    for (const Parameter& p : in_file_order(shape)) {
        offsets[p.name] = end;
        end +=
            static_cast<uint64_t>(p.name == before_blocks[0] ? padded * shape.n_embd : p.numel()) *
            element;
    }
    if (bytes.size() != end)
        throw Error(path.string(), " has ", bytes.size(), " bytes, but its header calls for ", end,
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

void write_llmc_model(const fs::path& path, const StoredModel& model, StoredType dtype) {
    if (dtype == StoredType::fp16)
        throw Error("llm.c's model files hold fp32 or bf16, not fp16; choose one with --dtype");
    const GPTShape& shape = model.shape;
    int32_t header[header_ints] = {};
    header[at_magic] = magic;
    header[at_version] = dtype == StoredType::fp32 ? fp32_version : bf16_version;
    header[at_n_ctx] = shape.n_ctx;
    header[at_vocab] = static_cast<int32_t>(shape.vocab_size);
    header[at_layers] = shape.n_layer;
    header[at_heads] = shape.n_head;
    header[at_channels] = shape.n_embd;
    header[at_padded] = static_cast<int32_t>(shape.padded_vocab());
    AtomicFile file(path);
    file.write(std::as_bytes(std::span(header)));
    for (const Parameter& p : in_file_order(shape)) {
        write_parameter(model, p, dtype, false,
                        [&](std::span<const std::byte> bytes) { file.write(bytes); });
        if (p.name == before_blocks[0])
            file.write(std::vector<std::byte>(
                static_cast<size_t>((shape.padded_vocab() - shape.vocab_size) * shape.n_embd) *
                size_of(dtype)));
    }
    file.commit();
}

}  // namespace train_gpt
