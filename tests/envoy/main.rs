//! The gateway between two real Envoys: one as double-HBONE client, one as the endpoint that
//! terminates the inner tunnel. Also Envoy as the gateway, for `strait load`.

#![expect(unreachable_pub, reason = "a test binary exports nothing, and plain `pub` reads better")]

#[cfg(test)]
#[expect(dead_code, reason = "shared with tests/load, which uses more of it")]
#[path = "../load/command.rs"]
mod command;
#[cfg(test)]
mod load;
#[cfg(test)]
mod mesh;
#[cfg(test)]
mod process;
#[cfg(test)]
mod programmed;
#[cfg(test)]
mod remote;
#[cfg(test)]
mod same_eds;
#[cfg(test)]
mod sidecar;
#[cfg(test)]
#[expect(dead_code, unused_imports, reason = "shared with tests/it, which uses more of it")]
#[path = "../it/support/mod.rs"]
mod support;
#[cfg(test)]
mod tests;
#[cfg(test)]
mod traces;
#[cfg(test)]
mod traffic;
#[cfg(test)]
mod waypoint;
