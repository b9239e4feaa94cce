#include "model/families/family.h"

#include "base/error.h"
#include "base/printable.h"
#include "model/families/gpt2.h"
#include "model/families/llama.h"
#include "model/families/mistral.h"
#include "model/families/other.h"
#include "model/families/qwen2.h"
#include "model/families/qwen3.h"

namespace train_gpt {

namespace {

const Family* const families[] = {&gpt2, &llama, &qwen2, &qwen3, &mistral, &other};

}  // namespace

const Family& family_of(const std::string& model_type, const std::string& where) {
    std::string known;
    for (const Family* family : families) {
        if (family->model_type == model_type) return *family;
        if (family != &other)
            known += concat(known.empty() ? "" : ", ", "\"", family->model_type, "\"");
    }
    throw Error(where, " has model_type = ", quoted(model_type), "; only ", known,
                " are supported");
}

Registry registry_of(const DecoderSpec& spec) { return spec.family->registry(spec); }

const Family& family_for(const DecoderSpec& spec) {
    if (spec.family->holds(spec)) return *spec.family;
    for (const Family* family : families)
        if (family->holds(spec)) return *family;
    return other;
}

}  // namespace train_gpt
