//! Client of the running gateway's admin port, with the command `strait dump`.

use std::io::{ErrorKind, Write};
use std::net::SocketAddr;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, anyhow, bail};
use axum::body::{Body, BodyDataStream, Bytes};
use clap::Args;
use http::{Method, Request, StatusCode};
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::net::TcpStream;
use tokio::time::timeout;
use tokio_stream::StreamExt;

/// Deadline for the head of an answer, and for each piece of its body unless that has a longer one.
const DEADLINE: Duration = Duration::from_secs(10);
/// Default of `admin.bind`.
const DEFAULT_ADMIN_ADDRESS: &str = "127.0.0.1:15000";
/// Limit of an answer that is held in memory: the size of about a million endpoints.
const RESPONSE_BYTES_MAX: usize = 256 << 20;

#[derive(Clone, Debug, Args)]
pub(super) struct Admin {
    /// Address of the gateway's admin port, `admin.bind` in its configuration.
    #[arg(
        long,
        value_name = "ADDR",
        num_args = 0..=1,
        default_value = DEFAULT_ADMIN_ADDRESS,
        default_missing_value = DEFAULT_ADMIN_ADDRESS
    )]
    admin: String,
}

pub(super) fn dump(admin: &Admin) -> ExitCode {
    run_admin_command(async {
        let dump = admin.request(Method::GET, "/config_dump", &()).await?;
        dump.print_success().await
    })
}

/// Runs `asking` to its exit code. An error, such as no answer, is printed and exits 2.
pub(super) fn run_admin_command(
    asking: impl Future<Output = anyhow::Result<ExitCode>>,
) -> ExitCode {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let done =
        runtime.context("cannot start a runtime").and_then(|runtime| runtime.block_on(asking));
    done.unwrap_or_else(|error| {
        eprintln!("{error:#}");
        ExitCode::from(2)
    })
}

/// Answer with a body that is still arriving.
pub(super) struct AdminResponse {
    pub(super) status: StatusCode,
    body: BodyDataStream,
    /// Longest time without a byte of the body.
    deadline: Duration,
}

impl Admin {
    /// Returns the admin port at an address.
    pub(super) fn at(address: SocketAddr) -> Self {
        Self { admin: address.to_string() }
    }

    /// Sends a request and returns as soon as the head of the answer has arrived.
    pub(super) async fn request(
        &self,
        method: Method,
        path: &str,
        query: &impl Serialize,
    ) -> anyhow::Result<AdminResponse> {
        let admin = self.admin.as_str();
        let uri = format!("{path}?{}", serde_urlencoded::to_string(query)?);
        let asking = async {
            let stream = TcpStream::connect(admin).await?;
            // Against DNS rebinding, the admin port accepts only IP addresses and `localhost` in
            // `host`.
            let host = stream.peer_addr()?.to_string();
            let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await?;
            tokio::spawn(connection);
            let request = Request::builder().method(method).uri(uri).header("host", host);
            let answer = sender.send_request(request.body(Body::empty())?).await?;
            anyhow::Ok(answer)
        };
        let answered = timeout(DEADLINE, asking).await;
        let answered = answered.unwrap_or_else(|_| Err(anyhow!("no answer within {DEADLINE:?}")));
        let answer = answered.with_context(|| {
        format!(
            "request to the admin port at {admin} failed; check that a gateway runs there, or give \
             its `admin.bind` by --admin"
        )
    })?;
        let (head, body) = answer.into_parts();
        let body = Body::new(body).into_data_stream();
        Ok(AdminResponse { status: head.status, body, deadline: DEADLINE })
    }
}

fn unexpected_server(status: StatusCode) -> anyhow::Error {
    anyhow!(
        "unexpected status {status}: the server is not an admin port of this version of strait; \
         give the gateway's `admin.bind` by --admin"
    )
}

/// Decodes JSON of a gateway of this version.
pub(super) fn decode<T: DeserializeOwned>(json: &[u8]) -> anyhow::Result<T> {
    let answer = serde_json::from_slice(json);
    answer.context("cannot decode the gateway's answer; use the gateway's version of strait")
}

impl AdminResponse {
    /// Sets the longest time without a byte of the body.
    #[cfg(feature = "tools")]
    pub(super) fn with_deadline(self, deadline: Duration) -> Self {
        Self { deadline, ..self }
    }

    /// Prints the body of a successful answer to stdout.
    pub(super) async fn print_success(self) -> anyhow::Result<ExitCode> {
        match self.status {
            StatusCode::OK => self.print(&mut std::io::stdout()).await?,
            status => return Err(unexpected_server(status)),
        }
        Ok(ExitCode::SUCCESS)
    }

    /// Prints the gateway's refusal to stderr; the exit code is 1. An answer without a body is not
    /// from strait, and is an error.
    pub(super) async fn print_refusal(mut self) -> anyhow::Result<ExitCode> {
        let Some(piece) = self.next_chunk().await? else {
            return self.print_success().await.map(|_| ExitCode::FAILURE);
        };
        std::io::stderr().write_all(&piece)?;
        self.print(&mut std::io::stderr()).await?;
        Ok(ExitCode::FAILURE)
    }

    /// Decodes the body of a successful answer of a gateway of this version.
    ///
    /// # Errors
    /// The gateway's own, if it refuses the request.
    pub(super) async fn decode<T: DeserializeOwned>(self) -> anyhow::Result<T> {
        decode(&self.successful().await?.read().await?)
    }

    /// Returns a successful answer.
    ///
    /// # Errors
    /// The gateway's own, if it refuses the request.
    pub(super) async fn successful(self) -> anyhow::Result<Self> {
        match self.status {
            StatusCode::OK => Ok(self),
            StatusCode::BAD_REQUEST | StatusCode::SERVICE_UNAVAILABLE => {
                bail!("{}", String::from_utf8_lossy(&self.read().await?).trim_end())
            }
            status => Err(unexpected_server(status)),
        }
    }

    /// Reads the whole body, up to [`RESPONSE_BYTES_MAX`].
    pub(super) async fn read(mut self) -> anyhow::Result<Vec<u8>> {
        let mut bytes = Vec::new();
        while self.read_more(&mut bytes).await? {}
        Ok(bytes)
    }

    /// Appends the next piece of the body to `bytes`, up to [`RESPONSE_BYTES_MAX`]. Returns false
    /// at the end.
    pub(super) async fn read_more(&mut self, bytes: &mut Vec<u8>) -> anyhow::Result<bool> {
        let Some(piece) = self.next_chunk().await? else { return Ok(false) };
        if bytes.len() + piece.len() > RESPONSE_BYTES_MAX {
            bail!("answer exceeds {RESPONSE_BYTES_MAX} bytes; omit --all");
        }
        bytes.extend_from_slice(&piece);
        Ok(true)
    }

    /// Writes the body as it arrives. A reader that closes the pipe is not an error.
    async fn print(mut self, to: &mut impl Write) -> anyhow::Result<()> {
        while let Some(piece) = self.next_chunk().await? {
            match to.write_all(&piece).and_then(|()| to.flush()) {
                Err(error) if error.kind() == ErrorKind::BrokenPipe => return Ok(()),
                written => written?,
            }
        }
        Ok(())
    }

    async fn next_chunk(&mut self) -> anyhow::Result<Option<Bytes>> {
        let deadline = self.deadline;
        let piece = timeout(deadline, self.body.next()).await;
        let piece = piece
            .map_err(|_| anyhow!("the gateway's answer stalled, no data within {deadline:?}"))?;
        piece.transpose().context("the gateway's answer was truncated")
    }
}

#[cfg(all(test, feature = "tools"))]
mod tests {
    use tokio::time::Instant;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn an_answer_has_stalled_after_its_deadline_without_a_byte() {
        for (deadline, seconds) in [(DEADLINE, 10), (Duration::from_secs(30), 30)] {
            let body = Body::from_stream(tokio_stream::pending::<std::io::Result<Bytes>>());
            let body = body.into_data_stream();
            let answer = AdminResponse { status: StatusCode::OK, body, deadline: DEADLINE };
            let start = Instant::now();
            let read = async |mut answer: AdminResponse| answer.read_more(&mut Vec::new()).await;
            let error = read(answer.with_deadline(deadline)).await.expect_err("no data");
            let expected = format!("the gateway's answer stalled, no data within {seconds}s");
            assert_eq!(error.to_string(), expected);
            assert_eq!(start.elapsed().as_secs(), seconds);
        }
    }
}
