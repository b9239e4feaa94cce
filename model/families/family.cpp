#include "model/families/family.h"

#include "base/error.h"
#include "base/printable.h"
#include "model/families/gpt2.h"

namespace train_gpt {

namespace {

const Family* const families[] = {&gpt2};

}  // namespace

const Family& family_of(const std::string& model_type, const std::filesystem::path& path) {
    std::string known;
    for (const Family* family : families) {
        if (family->model_type == model_type) return *family;
        known += concat(known.empty() ? "" : ", ", "\"", family->model_type, "\"");
    }
    throw Error(path.string(), " has model_type = ", quoted(model_type), "; only ", known,
                " is supported");
}

const Family& default_family() { return gpt2; }

}  // namespace train_gpt
