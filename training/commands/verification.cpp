#include "training/commands/verification.h"

#include <algorithm>
#include <filesystem>
#include <vector>

#include "base/error.h"
#include "base/printable.h"
#include "base/terminal_text.h"
#include "dataloader/manifest.h"
#include "training/commands/run_verification.h"
#include "training/commands/verification_table.h"
#include "training/files/checkpoint.h"
#include "training/files/model_card.h"
#include "training/files/model_folder.h"

namespace train_gpt {

namespace fs = std::filesystem;

namespace {

bool is_checkpoint(const fs::path& folder) {
    return is_model_folder(folder) && fs::exists(folder / "manifest.json");
}

std::vector<RecordedFile> files_of_model(const fs::path& folder) {
    if (fs::exists(folder / provenance_file)) return exported_files(folder);
    std::vector<RecordedFile> files;
    for (const auto& entry : fs::directory_iterator(folder))
        if (entry.is_regular_file())
            files.push_back({.path = entry.path(), .manifest = {}, .bytes = {}, .hash = {}});
    std::ranges::sort(files, {}, &RecordedFile::path);
    return files;
}

/// Throws UsageError for options that only a run, or an exported model, has.
void require_applicable(const VerifyOptions& options, bool is_run, bool is_export) {
    if (!is_run && (!options.binary.empty() || !options.head.empty() || options.without_data))
        throw UsageError("--binary, --head and --without-data are for a run's folder, and ",
                         options.what, " is none");
    if (!is_export && !options.run.empty())
        throw UsageError("--run is for a model that `train_gpt export` wrote (it has a ",
                         provenance_file, "), and ", options.what, " is none");
}

Json verify_folder(const fs::path& folder, const VerifyOptions& options, VerificationTable& table) {
    const bool is_data = fs::exists(folder / data_manifest), is_model = is_model_folder(folder);
    const bool is_run = !is_data && !is_model && is_run_folder(folder);
    require_applicable(options, is_run, is_model && fs::exists(folder / provenance_file));
    if (is_data) {
        table.section(folder.string(), recorded_data(folder));
    } else if (is_checkpoint(folder)) {
        return verify_one_checkpoint(folder, table);
    } else if (is_model) {
        table.section(folder.string(), files_of_model(folder));
        if (!options.run.empty())
            if (const std::string trouble = export_trouble(folder, options.run); !trouble.empty())
                table.trouble((folder / provenance_file).string(), trouble);
    } else if (is_run) {
        return verify_run(folder, options, table);
    } else {
        std::vector<fs::path> shards;
        for (const auto& entry : fs::directory_iterator(folder))
            if (entry.path().extension() == ".bin") shards.push_back(entry.path());
        if (shards.empty())
            throw Error(folder.string(),
                        " holds no token shards, no checkpoint and no model; name the folder of "
                        "one, or a run's");
        std::ranges::sort(shards);
        table.section(folder.string(), recorded_shards(shards));
    }
    return Json::object();
}

}  // namespace

bool verify(const VerifyOptions& options, std::FILE* out) {
    VerificationTable table(options.json ? nullptr : out);
    const fs::path path = options.what;
    Json found = Json::object();
    if (fs::is_directory(path)) {
        found = verify_folder(path, options, table);
    } else {
        require_applicable(options, false, false);
        if (path.filename() == data_manifest)
            table.section(path.string(),
                          recorded_data(path.has_parent_path() ? path.parent_path() : "."));
        else
            table.section(options.what, recorded_shards(glob_files(options.what)));
    }
    const bool good = table.close();
    const std::string& broken = table.first_trouble();
    if (options.json) {
        Json all = {{"verified", options.what},
                    {"holds", good},
                    {"broken", good ? Json() : Json(broken)},
                    {"files", table.counts()},
                    {"bad_files", table.bad_files()}};
        all.update(found);
        std::fprintf(out, "%s\n", to_text(all, 2).c_str());
    } else if (!good) {
        print_line(out, "first: " + printable_line(broken));
    }
    return good;
}

}  // namespace train_gpt
