#include "base/json_file.h"

#include "base/file.h"

namespace train_gpt {

Json read_json(const std::filesystem::path& path) {
    const MappedFile file(path);
    try {
        return parse_json(file.text());
    } catch (const Error& error) {
        throw Error(path.string(), " ", error.what(), "; restore it from a copy");
    }
}

}  // namespace train_gpt
