// What: the parts of the page, one function a part; each returns HTML or nothing.
// Why: the page is a list of parts, and a part is shown where its data is present.
// Never: called with a document that the schema has not accepted.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>

namespace talea::report {

std::string loss_section(const nlohmann::json& document);
std::string errors_section(const nlohmann::json& errors);
std::string check_section(const nlohmann::json& check);
std::string bench_section(const nlohmann::json& bench);
std::string train_section(const nlohmann::json& train);
std::string repro_section(const nlohmann::json& repro);
// Gates, sentinels, and the table of planted bugs against the gates that caught them.
std::string gates_section(const nlohmann::json& document);
std::string provenance_section(const nlohmann::json& provenance);

}  // namespace talea::report
