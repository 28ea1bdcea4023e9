//! Shared support of the tests: certificates in memory, separate addresses, the gateway's process.

pub mod bytes;
pub mod ca;
pub mod cgroup;
pub mod dns;
pub mod eds;
mod endpoint;
mod gateway;
mod identities;
pub mod istiod;
pub mod kubelet;
pub mod link;
pub mod memory;
pub mod mounted;
mod net;
pub mod oracle;
pub mod pod;
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

use std::future::Future;
use std::time::Duration;

use strait::tools::hbone::Tunnel;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

pub use endpoint::{ENDLESS, Endpoint, reset};
pub use gateway::{Gateway, RESTART_MAX, Settings, raise_descriptor_limit, replace};
pub use identities::{CLIENT, ENDPOINT, GATEWAY, Identities, identities};
pub use net::{Net, endpoint_port};

/// Service that tests expose by default.
pub const ECHO: &str = "echo.app.svc.cluster.local:80";

/// Limit of every wait of a test, so that a hang is a named failure.
pub const DEADLINE: Duration = Duration::from_secs(120);

/// Runs a test's future under [`DEADLINE`].
pub fn run<T>(test: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .expect("a runtime")
        .block_on(async {
            tokio::time::timeout(DEADLINE, test)
                .await
                .expect("within the deadline")
        })
}

/// Prints a line that shows although the test passes: cargo captures only the output of macros.
pub fn print_uncaptured(line: &str) {
    use std::io::Write as _;
    let _ = writeln!(std::io::stderr(), "{line}");
}

/// Polls until the answer is as wanted. Fails with the last answer at the deadline.
pub async fn until<T: std::fmt::Debug>(
    what: &str,
    mut ask: impl AsyncFnMut() -> T,
    wanted: impl Fn(&T) -> bool,
) -> T {
    let deadline = tokio::time::Instant::now() + Duration::from_secs(10);
    loop {
        let answer = ask().await;
        if wanted(&answer) {
            return answer;
        }
        assert!(
            tokio::time::Instant::now() < deadline,
            "{what}: last seen {answer:?}"
        );
        // deadline: the state of another process can only be polled.
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// Asserts that a tunnel is open: its endpoint echoes bytes.
pub async fn echoes(tunnel: &mut Tunnel) {
    tunnel.write_all(b"hello").await.expect("an open tunnel");
    let mut answer = [0; 5];
    let read = tunnel.read_exact(&mut answer).await;
    read.expect("an open tunnel");
    assert_eq!(&answer, b"hello");
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
