"""The environment variables that the batch script, launch and the ranks hand on. Nothing else is passed this way."""

RUN_DIR = "PCTOOL_RUN_DIR"  # the run directory, absolute
ATTEMPT = "PCTOOL_ATTEMPT"  # this attempt's number, decimal
NONCE = "PCTOOL_NONCE"  # this attempt's nonce; the channel accepts only peers that know it
HUB = "PCTOOL_HUB"  # host:port on node 0 where the launches meet
STORE = "PCTOOL_STORE"  # s3://bucket/prefix, unset without a mirror
EVERY = "PCTOOL_EVERY"  # steps between checkpoints, or a time as in 10min, or auto; unset: what the script says
KEEP = "PCTOOL_KEEP"  # complete checkpoints kept, unset: all
KEEP_FOR = "PCTOOL_KEEP_FOR"  # how long each is kept, as in 7d; unset: no matter how old
KEEP_EVERY = "PCTOOL_KEEP_EVERY"  # the first of each so many steps is kept for good, unset: none
MIRROR = "PCTOOL_MIRROR"  # how checkpoints get to the store: copy (unset too) or dra
MIRROR_MBPS = "PCTOOL_MIRROR_MBPS"  # the mirror's share of the bandwidth in MB/s, unset: no bound
PAGE = "PCTOOL_PAGE"  # path of the shared page (launch -> ranks)
WRITER = "PCTOOL_WRITER"  # abstract Unix socket of this node's checkpoint writers, unset: each rank starts its own
ROOM = "PCTOOL_ROOM"  # "ignore": save whatever the file system says of its free space
IMDS = "AWS_EC2_METADATA_SERVICE_ENDPOINT"  # as AWS's SDKs have it
NOTICE_FILE = "PCTOOL_NOTICE_FILE"  # where root's watcher keeps its notice file, unset: /run/pctool/notice.json
