#include "training/commands/verification.h"

#include <algorithm>
#include <array>
#include <filesystem>
#include <vector>

#include "base/error.h"
#include "base/printable.h"
#include "dataloader/manifest.h"
#include "dataloader/shard.h"
#include "dataloader/verify.h"
#include "training/files/checkpoint.h"
#include "training/files/model_folder.h"

namespace train_gpt {

namespace fs = std::filesystem;

namespace {

/// The table, printed row by row as the files are read.
class Table {
  public:
    explicit Table(std::FILE* out) : out_(out) {}

    void section(const fs::path& of, const std::vector<RecordedFile>& files) {
        std::fprintf(out_, "%s\n", printable_line(of.string()).c_str());
        size_t width = 0;
        for (const RecordedFile& file : files) width = std::max(width, name(file).size());
        for (const RecordedFile& file : files) row(file, static_cast<int>(width));
    }
    /// A section that cannot be read at all.
    void trouble(const fs::path& of, const Error& error) {
        std::fprintf(out_, "%s\n  damaged: %s\n", printable_line(of.string()).c_str(),
                     error.what());
        ++count(FileState::damaged);
    }

    /// Prints the closing line. Returns whether nothing was damaged or missing.
    bool close() {
        const int bad = count(FileState::damaged) + count(FileState::missing);
        std::string text;
        for (const FileState state :
             {FileState::good, FileState::damaged, FileState::missing, FileState::no_hash})
            if (count(state) > 0)
                text += concat(text.empty() ? "" : ", ", count(state), " ", name_of(state));
        std::fprintf(out_, "%s\n",
                     text.empty() ? "there is nothing to verify" : (text + advice()).c_str());
        return bad == 0;
    }

  private:
    static std::string name(const RecordedFile& file) {
        return printable_line(file.path.filename().string());
    }

    void row(const RecordedFile& file, int width) {
        std::fprintf(out_, "  %-*s  ", width, name(file).c_str());
        std::fflush(out_);
        std::error_code code;
        const uintmax_t bytes = fs::file_size(file.path, code);
        std::string reason;
        FileState state = FileState::damaged;
        try {
            state = verify_file(file);
            // Without a hash, at least the length in a shard's header can be checked.
            if (state == FileState::no_hash && file.path.extension() == ".bin")
                require_shard(file.path);
        } catch (const Error& error) {
            state = FileState::damaged;
            reason = concat(": ", error.what());
        }
        ++count(state);
        std::fprintf(out_, "%15s  %s%s\n", code ? "" : with_separators(bytes).c_str(),
                     name_of(state), reason.c_str());
    }

    int& count(FileState state) { return counts_[static_cast<size_t>(state)]; }
    std::string advice() {
        if (count(FileState::damaged) + count(FileState::missing) > 0)
            return "; copy these files again, or make them again";
        return count(FileState::no_hash) > 0
                   ? "; without a recorded hash there is nothing to compare with"
                   : "";
    }

    std::FILE* out_;
    std::array<int, 4> counts_{};
};

bool is_checkpoint(const fs::path& folder) {
    return is_model_folder(folder) && fs::exists(folder / "manifest.json");
}

std::vector<RecordedFile> files_of_model(const fs::path& folder) {
    std::vector<RecordedFile> files;
    for (const auto& entry : fs::directory_iterator(folder))
        if (entry.is_regular_file())
            files.push_back({.path = entry.path(), .manifest = {}, .bytes = {}, .hash = {}});
    std::ranges::sort(files, {}, &RecordedFile::path);
    return files;
}

void verify_folder(const fs::path& folder, Table& table) {
    if (fs::exists(folder / data_manifest)) {
        table.section(folder, recorded_data(folder));
    } else if (is_checkpoint(folder)) {
        table.section(folder, recorded_files(folder));
    } else if (is_model_folder(folder)) {
        table.section(folder, files_of_model(folder));
    } else if (const auto checkpoints = list_checkpoints(folder); !checkpoints.empty()) {
        for (const fs::path& checkpoint : checkpoints) {
            try {
                table.section(checkpoint, recorded_files(checkpoint));
            } catch (const Error& error) {
                table.trouble(checkpoint, error);
            }
        }
    } else {
        std::vector<fs::path> shards;
        for (const auto& entry : fs::directory_iterator(folder))
            if (entry.path().extension() == ".bin") shards.push_back(entry.path());
        if (shards.empty())
            throw Error(folder.string(),
                        " holds no token shards, no checkpoint and no model; name the folder of "
                        "one, or a run's");
        std::ranges::sort(shards);
        table.section(folder, recorded_shards(shards));
    }
}

}  // namespace

bool verify(const std::string& what, std::FILE* out) {
    Table table(out);
    const fs::path path = what;
    if (fs::is_directory(path))
        verify_folder(path, table);
    else if (path.filename() == data_manifest)
        table.section(path, recorded_data(path.has_parent_path() ? path.parent_path() : "."));
    else
        table.section(what, recorded_shards(glob_files(what)));
    return table.close();
}

}  // namespace train_gpt
