# Facts baked into the binary: the receipt schema (as text) and how it was built.
# Run as a script (-P) at build time for the git revision, which may change between two builds.
if(CMAKE_SCRIPT_MODE_FILE)
  set(revision unknown)
  set(dirty -1)
  find_package(Git QUIET)
  if(GIT_FOUND AND EXISTS ${SOURCE_DIR}/.git)
    execute_process(COMMAND ${GIT_EXECUTABLE} rev-parse HEAD WORKING_DIRECTORY ${SOURCE_DIR}
                    OUTPUT_VARIABLE head OUTPUT_STRIP_TRAILING_WHITESPACE
                    RESULT_VARIABLE failed ERROR_QUIET)
    if(NOT failed)
      set(revision ${head})
      execute_process(COMMAND ${GIT_EXECUTABLE} status --porcelain --untracked-files=no
                      WORKING_DIRECTORY ${SOURCE_DIR} OUTPUT_VARIABLE changes ERROR_QUIET)
      # A source that git does not know is compiled (folders are globbed) or included all the same.
      execute_process(COMMAND ${GIT_EXECUTABLE} ls-files --others --exclude-standard -- include src
                              apps yardsticks repro tests cmake python
                      WORKING_DIRECTORY ${SOURCE_DIR} OUTPUT_VARIABLE untracked ERROR_QUIET)
      set(dirty 0)
      if(changes OR untracked)
        set(dirty 1)
      endif()
    endif()
  endif()
  set(text "#define TALEA_GIT_REVISION \"${revision}\"\n#define TALEA_GIT_DIRTY ${dirty}\n")
  set(old "")
  if(EXISTS ${OUTPUT})
    file(READ ${OUTPUT} old)
  endif()
  if(NOT text STREQUAL old)  # an unchanged file costs no compilation
    file(WRITE ${OUTPUT} "${text}")
  endif()
  return()
endif()

set(talea_generated ${PROJECT_BINARY_DIR}/generated)
set_property(DIRECTORY ${PROJECT_SOURCE_DIR} APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS
             ${PROJECT_SOURCE_DIR}/receipts/schema/receipt.schema.json)
file(READ ${PROJECT_SOURCE_DIR}/receipts/schema/receipt.schema.json talea_schema)
file(CONFIGURE OUTPUT ${talea_generated}/receipt_schema.inc CONTENT "R\"schema(@talea_schema@)schema\"\n"
     @ONLY)

string(TOUPPER "${CMAKE_BUILD_TYPE}" talea_type)
string(STRIP "${CMAKE_CXX_FLAGS} ${CMAKE_CXX_FLAGS_${talea_type}}" talea_flags)
string(REPLACE "\"" "\\\"" talea_flags "${talea_flags}")
file(CONFIGURE OUTPUT ${talea_generated}/build_facts.inc @ONLY CONTENT [[
#define TALEA_VERSION "@PROJECT_VERSION@"
#define TALEA_COMPILER "@CMAKE_CXX_COMPILER_ID@ @CMAKE_CXX_COMPILER_VERSION@"
#define TALEA_BUILD_TYPE "@CMAKE_BUILD_TYPE@"
#define TALEA_BUILD_FLAGS "@talea_flags@"
#define TALEA_BUILD_SANITIZE "@TALEA_SANITIZE@"
]])

# Always run, but it writes only what changed; BYPRODUCTS lets Ninja see whether it did.
add_custom_target(talea_git_facts
  COMMAND ${CMAKE_COMMAND} -DSOURCE_DIR=${PROJECT_SOURCE_DIR}
          -DOUTPUT=${talea_generated}/git_facts.inc -P ${CMAKE_CURRENT_LIST_DIR}/embed.cmake
  BYPRODUCTS ${talea_generated}/git_facts.inc
  COMMENT "")
