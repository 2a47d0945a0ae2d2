"""kvstored: the daemon of a node. `server` starts it; calls go front -> store -> disk, and the data plane is native."""
