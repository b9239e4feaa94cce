#include "training/files/interchange.h"

#include <filesystem>
#include <functional>

#include "base/error.h"
#include "base/file.h"
#include "model/families/family.h"
#include "training/files/checkpoint.h"
#include "training/files/llmc_model.h"
#include "training/files/model_card.h"
#include "training/files/model_folder.h"

namespace train_gpt {

namespace fs = std::filesystem;

namespace {

/// The path without a trailing slash, so that names of siblings can be derived from it.
fs::path place_of(const std::string& out) {
    if (out.empty()) throw UsageError("--out is empty; name what is to be written");
    const fs::path path = fs::absolute(out).lexically_normal();
    return path.has_filename() ? path : path.parent_path();
}

/// Throws Error if something exists at `path`, unless a folder is to be written and it is an empty
/// folder.
void require_free(const fs::path& path, bool folder) {
    std::error_code code;
    if (fs::symlink_status(path, code).type() == fs::file_type::not_found) return;
    if (folder && fs::is_directory(path, code) && fs::is_empty(path, code) && !code) return;
    throw Error(path.string(),
                folder && fs::is_directory(path) ? " is not empty" : " exists already",
                "; remove it or choose another --out");
}

/// Calls `write` with a temporary folder next to `out`, and renames it to `out` when it is
/// complete.
void write_folder(const std::string& out, const std::function<void(const fs::path&)>& write) {
    const fs::path path = place_of(out);
    require_free(path, true);
    fs::path temporary = path;
    temporary += ".tmp";
    if (fs::exists(temporary))
        throw Error(temporary.string(),
                    " is in the way, which an interrupted run may have left; remove it");
    make_directory(temporary);
    try {
        write(temporary);
        sync_directory(temporary);
        fs::rename(temporary, path);
        sync_directory(path.parent_path());
    } catch (const fs::filesystem_error& error) {
        std::error_code ignored;
        fs::remove_all(temporary, ignored);
        throw Error("cannot write ", path.string(), ": ", error.code().message());
    } catch (...) {
        std::error_code ignored;
        fs::remove_all(temporary, ignored);
        throw;
    }
}

/// Throws Error when a tokenizer has more tokens than its model has rows.
void require_tokens_fit(const Tokenizer& tokenizer, const std::string& where,
                        const DecoderSpec& spec) {
    if (tokenizer.vocab_size() > spec.vocab_size)
        throw Error("the tokenizer ", where, " has ", tokenizer.vocab_size(),
                    " tokens, but the model has ", spec.vocab_size,
                    "; it is not the one the model was trained with");
}

/// Who can read a model's files, for the end of a message; empty: transformers, too.
std::string only_readers(const DecoderSpec& spec) {
    const std::string beyond = beyond_transformers(spec);
    if (beyond.empty()) return "";
    return concat(
        "; only train_gpt reads it, since none of the families' classes in transformers "
        "has ",
        beyond);
}

/// Describes a model's parameters in a message.
std::string described(const StoredModel& model, StoredType dtype) {
    return concat(with_article(*model.spec.family), " of ", registry_of(model.spec).numel(),
                  " parameters in ", name_of(dtype));
}

}  // namespace

std::string import_model(const ImportOptions& options) {
    const bool is_folder = fs::is_directory(options.source);
    const fs::path source =
        is_folder ? find_whole_checkpoint(options.source) : fs::path(options.source);
    if (!is_folder && source.extension() == ".safetensors")
        throw Error(source.string(),
                    " does not describe the model's shape; name its folder, which has config.json");
    StoredModel model = upcycled(is_folder ? open_model_folder(source) : open_llmc_model(source),
                                 options.upcycling, source.string());
    std::optional<Tokenizer> tokenizer;
    if (!options.tokenizer.empty()) {
        tokenizer = Tokenizer::load(options.tokenizer);
        const std::optional<Tokenizer> theirs =
            is_folder ? read_folder_tokenizer(source) : std::nullopt;
        model.tokens = adapt_token_ids(model.tokens, theirs ? &*theirs : nullptr, *tokenizer);
    } else if (is_folder) {
        tokenizer = read_folder_tokenizer(source);
    }
    if (tokenizer)
        require_tokens_fit(*tokenizer,
                           options.tokenizer.empty() ? source.string() : options.tokenizer,
                           model.spec);
    write_folder(options.out, [&](const fs::path& folder) {
        write_model(folder, model, model.dtype);
        if (!options.tokenizer.empty())
            write_tokenizer(folder, *tokenizer, model.spec.n_ctx);
        else if (tokenizer)
            copy_tokenizer(source, folder, model.spec.n_ctx);
    });
    const std::string unlike = tokenizer && tokenizer->vocab_size() < model.spec.vocab_size
                                   ? concat("; the model has ", model.spec.vocab_size,
                                            " tokens, its tokenizer ", tokenizer->vocab_size())
                                   : "";
    return concat("imported ", described(model, model.dtype),
                  tokenizer ? "" : " without a tokenizer", " from ", source.string(), " into ",
                  options.out, unlike,
                  options.upcycling.n_expert > 0 ? only_readers(model.spec) : "");
}

std::string export_model(const ExportOptions& options) {
    const fs::path checkpoint = find_whole_checkpoint(options.checkpoint);
    StoredModel model = open_model_folder(checkpoint);
    const StoredType dtype = options.dtype.value_or(model.dtype);
    std::string from =
        dtype == model.dtype ? "" : concat(" from weights in ", name_of(model.dtype));
    if (model.dtype == StoredType::bf16 && dtype != StoredType::bf16)
        if (auto masters = open_masters(checkpoint)) {
            if (fs::exists(checkpoint / "manifest.json"))
                verify_checkpoint(checkpoint, Verify::everything);
            model.read = masters->read;
            from = " from the optimizer's fp32 masters";
        }
    if (options.format == ExportOptions::Format::llmc) {
        const fs::path file = place_of(options.out);
        require_free(file, false);
        if (file.has_parent_path()) make_directory(file.parent_path());
        write_llmc_model(file, model, dtype, history_of(checkpoint));
    } else {
        write_folder(options.out, [&](const fs::path& folder) {
            write_model(folder, model, dtype, options.max_file_bytes);
            if (const auto tokenizer = read_folder_tokenizer(checkpoint)) {
                require_tokens_fit(*tokenizer, checkpoint.string(), model.spec);
                copy_tokenizer(checkpoint, folder, model.spec.n_ctx);
            }
            write_model_card(folder, checkpoint, model.spec, dtype);
        });
    }
    return concat("exported ", described(model, dtype), from, " of ", checkpoint.string(), " to ",
                  options.out, only_readers(model.spec));
}

}  // namespace train_gpt
