#include "training/files/model_card.h"

#include <algorithm>
#include <utility>

#include "base/error.h"
#include "base/file.h"
#include "base/json_file.h"
#include "base/printable.h"
#include "base/version.h"
#include "model/families/family.h"
#include "training/files/checkpoint.h"
#include "training/files/history_chain.h"
#include "training/files/history_check.h"
#include "training/files/made_from.h"

namespace train_gpt {

namespace fs = std::filesystem;

namespace {

/// A value in a cell of a table, or in a line: Markdown must not take it for more than text.
std::string cell(const Json& value) {
    const std::string text = value.is_string() ? value.get<std::string>() : to_text(value);
    std::string safe;
    for (const char c : printable_line(text)) {
        if (std::string_view("|\\`*_<>[]").find(c) != std::string_view::npos) safe += '\\';
        safe += c;
    }
    return safe;
}

std::string count_in(const Json& json, const char* key) {
    const Json value = json.value(key, Json());
    return value.is_number_integer() && value.get<int64_t>() >= 0
               ? with_separators(value.get<uint64_t>())
               : "";
}

/// The rows of the sections of the configuration that say how the model was trained.
std::string hyperparameters(const Json& configuration) {
    std::string rows;
    for (const char* section : {"model", "batch", "optimizer", "schedule", "precision"}) {
        const Json of = configuration.value(section, Json());
        if (!of.is_object()) continue;
        for (const auto& [key, value] : of.items())
            rows += concat("| `", section, ".", key, "` | ", cell(value), " |\n");
    }
    if (configuration.contains("seed"))
        rows += concat("| `seed` | ", cell(configuration["seed"]), " |\n");
    return rows.empty() ? "" : "## Hyperparameters\n\n| key | value |\n|---|---|\n" + rows + "\n";
}

std::string data_section(const Json& made) {
    std::string text;
    for (const Json& source : made.value("sources", Json::array()))
        text += concat("| ", cell(source.value("name", Json("training data"))), " | ",
                       count_in(source, "tokens"), " |\n");
    if (text.empty()) return "";
    return concat(
        "## Training data\n\nTokens that were read of each source, repetitions "
        "included:\n\n| source | tokens |\n|---|---|\n",
        text, "\n");
}

std::string evaluation_section(const Json& made) {
    const Json evaluations = made.value("evaluations", Json::array());
    if (evaluations.empty()) return "";
    const Json& last = evaluations.back();
    std::string rows;
    for (const auto& [key, value] : last.items())
        if (key != "step" && key != "time" && key != "tokens")
            rows += concat("| `", key, "` | ", cell(value), " |\n");
    return concat("## Evaluation\n\nAfter step ", cell(last.value("step", Json())), " (",
                  count_in(last, "tokens"), " tokens):\n\n| measure | value |\n|---|---|\n", rows,
                  "\n");
}

std::string version_section(const Json& made) {
    std::string text = "## Made with\n\n";
    for (const Json& start : made.value("starts", Json::array()))
        text += concat("- ", describe_steps_of(start), ": train_gpt ",
                       cell(start.value("version", Json("unknown"))), " on ",
                       cell(start.value("ranks", Json(1))), " × ",
                       cell(start.value("device", Json("unknown"))), "\n");
    if (!made.contains("starts") && made.contains("program"))
        text += concat("- trained by train_gpt ", cell(made["program"]), "\n");
    text += concat("- exported by train_gpt ", cell(version()), "\n");
    if (made.contains("tokenizer"))
        text += concat("- tokenizer: SHA-256 `", cell(made["tokenizer"]["sha256"]), "`\n");
    text += concat("- checkpoint: step ", cell(made["step"]), ", SHA-256 of its manifest `",
                   cell(made["manifest"]), "`\n");
    if (made.contains("history"))
        text += concat("- history of the run up to the line with SHA-256 `", cell(made["history"]),
                       "`\n");
    return text;
}

}  // namespace

std::string model_card(const Json& made, const DecoderSpec& spec, StoredType dtype) {
    const bool for_all = beyond_transformers(spec).empty();
    const std::string named = with_article(*spec.family);
    return concat(
        "---\n", for_all ? "library_name: transformers\n" : "", "tags:\n- train_gpt\n---\n\n# ",
        static_cast<char>(std::toupper(named[0])), named.substr(1), " of ",
        with_separators(registry_of(spec).numel()), " parameters\n\nPretrained for ",
        cell(made["step"]), " steps",
        made.contains("tokens") ? concat(" on ", count_in(made, "tokens"), " tokens") : "",
        ". Weights in ", name_of(dtype), ". This page was written from the records of the run.\n\n",
        data_section(made), evaluation_section(made),
        hyperparameters(made.value("configuration", Json::object())), version_section(made));
}

std::string history_of(const fs::path& checkpoint) {
    const fs::path manifest = checkpoint / "manifest.json";
    return fs::exists(manifest)
               ? optional_field<std::string>(read_json(manifest), "history", "", manifest)
               : "";
}

void write_model_card(const fs::path& folder, const fs::path& checkpoint, const DecoderSpec& spec,
                      StoredType dtype) {
    if (!fs::exists(checkpoint / "manifest.json")) return;
    fs::path whole = fs::absolute(checkpoint).lexically_normal();
    if (!whole.has_filename()) whole = whole.parent_path();
    const Json made = made_from(whole, read_history(whole.parent_path()));
    write_file(folder / "README.md", model_card(made, spec, dtype));
    Json provenance = {{"format", "train_gpt provenance"},
                       {"program", version()},
                       {"step", made["step"]},
                       {"manifest", made["manifest"]}};
    if (made.contains("history")) provenance["history"] = made["history"];
    provenance["files"] = Json::object();
    std::vector<fs::path> files;
    for (const auto& entry : fs::directory_iterator(folder)) files.push_back(entry.path());
    std::ranges::sort(files);
    for (const fs::path& file : files)
        provenance["files"][file.filename().string()] = {{"bytes", fs::file_size(file)},
                                                         {"xxh3", hash_file(file)}};
    write_file(folder / provenance_file, to_text(provenance, 2) + "\n");
}

std::vector<RecordedFile> exported_files(const fs::path& folder) {
    const fs::path path = folder / provenance_file;
    const Json files = field<Json>(read_json(path), "files", path);
    std::vector<RecordedFile> recorded;
    for (const auto& [name, entry] : files.items()) {
        if (fs::path(name).filename() != name)
            throw Error(path.string(), " names a file outside its folder: ", name);
        recorded.push_back({.path = folder / name,
                            .manifest = path,
                            .bytes = field<uint64_t>(entry, "bytes", path),
                            .hash = field<std::string>(entry, "xxh3", path)});
    }
    return recorded;
}

std::string export_trouble(const fs::path& folder, const fs::path& run_dir) {
    const fs::path path = folder / provenance_file;
    const Json provenance = read_json(path);
    const auto step = field<int64_t>(provenance, "step", path);
    const HistoryChain history = read_history(run_dir);
    const std::string where = (run_dir / history_file).string();
    if (history.broken) return describe_break(run_dir, *history.broken);
    const auto head = optional_field<std::string>(provenance, "history", "", path);
    if (!history.line_of(head))
        return concat(path.string(), " names a line that ", where,
                      " does not have: the model is from another run, or lines were changed or "
                      "removed");
    const auto manifest = field<std::string>(provenance, "manifest", path);
    const bool recorded = std::ranges::any_of(history.lines, [&](const HistoryLine& line) {
        return line.event.value("event", Json()) == "checkpoint" &&
               line.event.value("step", Json()) == step &&
               line.event.value("manifest", Json()) == manifest;
    });
    return recorded ? ""
                    : concat(path.string(), " names a checkpoint of step ", step,
                             " that no line of ", where, " records");
}

}  // namespace train_gpt
