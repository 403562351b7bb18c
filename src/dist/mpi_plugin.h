/* What: the functions of talea_mpi.so, the plug-in that alone is linked with MPI.
 * Why: the library and the tool start on machines without MPI, and one build serves both.
 * Never: lets an exception or a C++ type cross. */
#pragma once

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define TALEA_MPI_PLUGIN_ABI 2

typedef struct talea_mpi_world talea_mpi_world;

typedef struct talea_mpi_plugin {
  int32_t abi; /* TALEA_MPI_PLUGIN_ABI */
  /* Each returns 0, or 1 with a text in error (error_bytes, terminated). */
  int32_t (*open)(double timeout_s, talea_mpi_world** world, int32_t* rank, int32_t* size,
                  char* error, int64_t error_bytes);
  int32_t (*exchange)(talea_mpi_world* world, const void* const* send, void* const* recv,
                      int64_t bytes, const char* what, char* error, int64_t error_bytes);
  void (*set_timeout)(talea_mpi_world* world, double timeout_s);
  void (*close)(talea_mpi_world* world);
} talea_mpi_plugin;

const talea_mpi_plugin* talea_mpi_plugin_entry(void);

#ifdef __cplusplus
}
#endif
