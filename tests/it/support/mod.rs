//! Shared support of the tests: certificates in memory, separate addresses, the gateway's process.

pub mod bytes;
pub mod ca;
pub mod cgroup;
pub mod clock;
pub mod collector;
pub mod dns;
pub mod eds;
mod endpoint;
mod gateway;
mod identities;
pub mod istiod;
pub mod kubelet;
pub mod lab;
pub mod link;
pub mod loss;
pub mod memory;
pub mod mounted;
mod net;
pub mod oracle;
pub mod pod;
pub mod process;
pub mod raw;
#[expect(
    unused_qualifications,
    clippy::allow_attributes,
    clippy::allow_attributes_without_reason,
    clippy::too_many_lines,
    reason = "the generator writes code for any place"
)]
pub mod services;
pub mod wds;
pub mod workload_api;

use strait::tools::hbone::Tunnel;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

pub use endpoint::{ENDLESS, Endpoint, RESET, reset};
pub use gateway::{Gateway, RESTART_MAX, Settings, raise_descriptor_limit, replace};
pub use identities::{
    CLIENT, ENDPOINT, GATEWAY, Identities, determine_clusters_by_issuers, identities,
};
pub use net::{Net, endpoint_port};
pub use process::{DEADLINE, run, strait, until};

/// Service that tests expose by default.
pub const ECHO: &str = "echo.app.svc.cluster.local:80";

/// Prints a line that shows although the test passes: cargo captures only the output of macros.
pub fn print_uncaptured(line: &str) {
    use std::io::Write as _;
    let _ = writeln!(std::io::stderr(), "{line}");
}

/// Prints that a test is skipped. Under `STRAIT_CI=1` that is a failure.
pub fn skip(test: &str, why: &str) {
    // Starts a new line, even if the harness has begun one.
    print_uncaptured(&format!("\nSKIPPED {test}: {why}"));
    let is_ci = std::env::var_os("STRAIT_CI").is_some_and(|ci| ci == "1");
    assert!(!is_ci, "nothing may be skipped under STRAIT_CI=1");
}

/// Asserts that a tunnel is open: its endpoint echoes bytes.
pub async fn echoes(tunnel: &mut Tunnel) {
    try_echo(tunnel).await.expect("an open tunnel");
}

/// Has the endpoint echo bytes. Fails if the tunnel breaks.
pub async fn try_echo(tunnel: &mut (impl AsyncRead + AsyncWrite + Unpin)) -> std::io::Result<()> {
    tunnel.write_all(b"hello").await?;
    let mut answer = [0; 5];
    tunnel.read_exact(&mut answer).await?;
    assert_eq!(&answer, b"hello");
    Ok(())
}

/// Returns the code of the reset that ends a tunnel. Bytes before it are ignored.
pub async fn broken(tunnel: &mut Tunnel) -> Option<h2::Reason> {
    let mut buffer = vec![0; 16 * 1024];
    loop {
        match tunnel.read(&mut buffer).await {
            Ok(0) => panic!("a broken tunnel ended cleanly"),
            Ok(_) => {}
            Err(error) => return Tunnel::reset_code(&error),
        }
    }
}
