#include "base/hub_files.h"

#include <algorithm>
#include <string>
#include <system_error>
#include <vector>

#include "base/error.h"
#include "base/file.h"

namespace train_gpt {

namespace fs = std::filesystem;

namespace {

bool is_root(const fs::path& folder) {
    std::error_code code;
    return fs::is_directory(folder / "blobs", code) && fs::is_directory(folder / "snapshots", code);
}

/// The folders in a folder, sorted; none if it cannot be read.
std::vector<fs::path> folders_in(const fs::path& folder) {
    std::vector<fs::path> folders;
    std::error_code code;
    for (fs::directory_iterator entry(folder, code), end; !code && entry != end;
         entry.increment(code))
        if (std::error_code ignored; entry->is_directory(ignored)) folders.push_back(entry->path());
    std::ranges::sort(folders);
    return folders;
}

/// The snapshot that refs/main names, or else the first; empty if there is none.
fs::path snapshot_of(const fs::path& root) {
    std::error_code code;
    if (const fs::path ref = root / "refs/main"; fs::is_regular_file(ref, code)) {
        const MappedFile file(ref);
        const std::string_view name = file.text().substr(0, file.text().find_first_of(" \r\n"));
        const fs::path snapshot = root / "snapshots" / name;
        if (!name.empty() && fs::is_directory(snapshot, code)) return snapshot;
    }
    const std::vector<fs::path> all = folders_in(root / "snapshots");
    return all.empty() ? fs::path() : all.front();
}

}  // namespace

void refuse_lfs_pointer(const fs::path& path, std::string_view beginning) {
    if (beginning.starts_with("version https://git-lfs.github.com/spec/"))
        throw Error(path.string(),
                    " is a Git LFS pointer, which stands for a file that was not fetched; run git "
                    "lfs pull in its repository, or download the file itself");
}

void refuse_cache_root(const fs::path& folder) {
    std::error_code code;
    if (fs::is_directory(folder / "hub", code)) refuse_cache_root(folder / "hub");
    if (folder.filename() == "snapshots" && is_root(folder.parent_path()))
        refuse_cache_root(folder.parent_path());
    if (is_root(folder)) {
        const fs::path snapshot = snapshot_of(folder);
        throw Error(folder.string(),
                    " is the root of a Hugging Face cache (blobs, refs, snapshots); ",
                    snapshot.empty() ? "its snapshots are empty: download the files again"
                                     : concat("name a snapshot in it: ", snapshot.string()));
    }
    const std::vector<fs::path> folders = folders_in(folder);
    const auto root = std::ranges::find_if(folders, [](const fs::path& path) {
        const std::string name = path.filename().string();
        return (name.starts_with("models--") || name.starts_with("datasets--")) && is_root(path);
    });
    if (root != folders.end())
        throw Error(folder.string(),
                    " is a Hugging Face cache of several models or data sets; name a snapshot of "
                    "one of them, such as ",
                    snapshot_of(*root).string());
}

}  // namespace train_gpt
