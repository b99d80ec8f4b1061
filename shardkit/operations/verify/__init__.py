"""Whether a checkpoint is whole: structure, checksums, or held against another one."""
