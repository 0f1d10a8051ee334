"""What `server.sh` serves; see README.md."""

from energonai.model import opt_125M

model_class = opt_125M
model_type = "gpt"
host = "localhost"
port = 29402  # where the ranks meet
half = False
checkpoint = "/model_checkpoint"  # a folder of Hugging Face, or one with metaseq's restored.pt
backend = None  # nccl with GPUs, gloo without

# parallelism
tp_init_size = 1
pp_init_size = 1

# http
tokenizer_path = "/model_checkpoint"
server_host = "0.0.0.0"
server_port = 8020
log_level = "error"
allow_cors = True
timeout_keep_alive = 180

# batches: prompts that follow each other and want the same are computed together
executor_max_batch_size = 16
executor_max_queue_size = 0

# cache: results of the last queries
cache_size = 50
cache_list_size = 2
fixed_cache_keys = [("Question: What is the name of the largest continent on earth?\nAnswer:", 64)]
