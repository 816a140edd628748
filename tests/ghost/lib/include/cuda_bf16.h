// NCCL names this header and uses nothing of it in C.
#pragma once
