//! Every kind of client certificate: admitted peers, and the reasons for the rejection of others.
//!
//! The cases run over the real listener of the gateway's process, and then against a real Envoy
//! with Istio's configuration.

#![expect(unreachable_pub, reason = "a test binary exports nothing, and plain `pub` reads better")]

#[cfg(test)]
mod cases;
#[cfg(test)]
mod compare;
#[cfg(test)]
mod der;
#[cfg(test)]
mod domains;
#[cfg(test)]
mod peer;
#[cfg(test)]
mod pki;
#[cfg(test)]
#[expect(dead_code, reason = "shared with tests/envoy, which uses more of it")]
#[path = "../envoy/process.rs"]
mod process;
#[cfg(test)]
#[expect(dead_code, unused_imports, reason = "shared with tests/it, which uses more of it")]
#[path = "../it/support/mod.rs"]
mod support;
#[cfg(test)]
mod table;
#[cfg(test)]
mod weak;
