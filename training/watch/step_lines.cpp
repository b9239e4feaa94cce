#include "training/watch/step_lines.h"

#include "base/file.h"
#include "base/mapped_pages.h"

namespace train_gpt {

namespace fs = std::filesystem;

void for_each_step_line(const fs::path& path, int64_t last_step, const TakeLine& take) {
    if (!fs::exists(path)) return;
    const MappedFile file(path);
    std::string_view text = file.text();
    size_t read = 0;
    for (size_t end; (end = text.find('\n')) != std::string_view::npos;
         text.remove_prefix(end + 1)) {
        if ((read += end + 1) >= most_mapped_bytes) {
            release_pages(file.bytes());
            read = 0;
        }
        const std::string_view line = text.substr(0, end);
        const Json json = try_parse_json(line);
        if (!json.is_object() || !json.contains("step") || !json["step"].is_number_integer())
            continue;
        if (json["step"].get<int64_t>() <= last_step) take(line, json);
    }
}

void keep_step_lines(const fs::path& path, std::optional<int64_t> resume_step,
                     const TakeLine& take) {
    if (!fs::exists(path)) return;
    if (!resume_step) {
        const fs::path old = path.parent_path() / (path.stem().string() + ".old.jsonl");
        const MappedFile all(path);
        if (all.text().size() > (fs::exists(old) ? fs::file_size(old) : 0))
            write_file(old, all.text());
    }
    AtomicFile file(path);
    if (resume_step)
        for_each_step_line(path, *resume_step, [&](std::string_view line, const Json& json) {
            if (take) take(line, json);
            file.write(line);
            file.write("\n");
        });
    file.commit();
}

}  // namespace train_gpt
