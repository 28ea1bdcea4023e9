//! Client that writes frames by hand, and reads what the gateway answers.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, bail, ensure};
use rustls::ClientConfig;
use rustls::pki_types::ServerName;
use tokio::io::{AsyncWriteExt, ReadHalf, WriteHalf};
use tokio::net::TcpStream;
use tokio::time::timeout;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

use crate::tls::{IdentityMaterial, TlsError, client_config_any_server};

use super::endpoint::{END, KEEP};
use super::outcome::{Outcome, State};
use super::raw::{self, Field, Frame};

pub(super) const RESULT_DEADLINE: Duration = Duration::from_secs(5);
pub(super) const METHOD: Field<'static> = (":method", b"CONNECT");

/// Gateway, and a client that it accepts.
#[derive(Clone, Debug)]
pub struct Target {
    pub address: SocketAddr,
    pub names: Names,
    /// True if the endpoint is that of [`endpoint`](super::endpoint), and no plain echo.
    pub is_scripted: bool,
    pub(super) limits: Limits,
    pub(super) material: Arc<IdentityMaterial>,
    pub(super) tls: Arc<ClientConfig>,
}

impl Target {
    /// Describes a gateway, with the certificate of the client and the roots of both.
    pub fn new(
        address: SocketAddr,
        material: IdentityMaterial,
        names: Names,
    ) -> Result<Self, TlsError> {
        let tls = client_config_any_server(&material, None)?;
        Ok(Self {
            address,
            names,
            is_scripted: false,
            limits: Limits::DEFAULT,
            material: Arc::new(material),
            tls,
        })
    }

    /// Opens a tunnel, reads the gateway's limits, and finds out whether the endpoint is that of
    /// the cases.
    ///
    /// # Errors
    /// The gateway opens no tunnel, or the endpoint does not return its bytes. No case could pass.
    pub async fn probe(&mut self) -> anyhow::Result<()> {
        let mut peer = Peer::connect(self, &[]).await?;
        self.limits = peer.limits;
        peer.open(self, 1).await?;
        peer.write(&raw::frame(raw::DATA, 0, 1, &[END])).await?;
        let answer = peer.until(|frame| frame.kind == raw::DATA).await;
        let returned = answer.as_ref().map(|frame| &*frame.payload).ok();
        self.is_scripted = returned == Some(&[]);
        ensure!(
            self.is_scripted || returned == Some(&[END]),
            "the endpoint behind {} does not return its bytes; run `strait load serve --mode \
             scripted`, without --hbone",
            self.names.echo
        );
        Ok(())
    }
}

#[derive(Clone, Debug)]
pub struct Names {
    /// Authority behind which an endpoint returns all bytes.
    pub echo: Arc<str>,
    /// Authority that the gateway does not know.
    pub unknown: Arc<str>,
}

impl Names {
    pub fn connect(&self) -> [Field<'_>; 2] {
        [METHOD, self.authority()]
    }

    pub fn rejected(&self) -> [Field<'_>; 2] {
        [METHOD, (":authority", self.unknown.as_bytes())]
    }

    pub(super) fn authority(&self) -> Field<'_> {
        (":authority", self.echo.as_bytes())
    }
}

/// Limits that the gateway's SETTINGS state, in bytes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Limits {
    /// Size of the largest frame (SETTINGS_MAX_FRAME_SIZE).
    pub(super) frame: u32,
    /// Window of a new stream (SETTINGS_INITIAL_WINDOW_SIZE).
    pub(super) window: u32,
}

impl Limits {
    /// Defaults (RFC 9113 section 6.5.2).
    pub(super) const DEFAULT: Self = Self { frame: 16_384, window: 65_535 };

    fn read(settings: &[u8]) -> Self {
        let (parameters, _) = settings.as_chunks::<6>();
        let mut limits = Self::DEFAULT;
        for &[high, low, a, b, c, d] in parameters {
            let value = u32::from_be_bytes([a, b, c, d]);
            match (high, low) {
                (0, 4) => limits.window = value,
                (0, 5) => limits.frame = value,
                _ => {}
            }
        }
        limits
    }
}

/// Connection, with a decoder of header blocks that is independent of the gateway's.
pub(super) struct Peer {
    stream: TlsStream<TcpStream>,
    limits: Limits,
    /// True if the gateway has sent END_STREAM, and nothing more is due.
    is_answered: bool,
    decoder: loona_hpack::Decoder<'static>,
}

/// Opens a TLS session, before the first byte of HTTP/2.
pub(super) async fn session(
    address: SocketAddr,
    tls: &Arc<ClientConfig>,
) -> anyhow::Result<TlsStream<TcpStream>> {
    let opened = async {
        let tcp = TcpStream::connect(address).await?;
        // The receive buffer holds all answers to a flood. Otherwise the gateway's last frames
        // would wait until they are read, and a reset could overtake them.
        socket2::SockRef::from(&tcp).set_recv_buffer_size(1 << 20)?;
        tcp.set_nodelay(true)?;
        // The name is never sent, and the verifier ignores it.
        let nobody = ServerName::IpAddress(IpAddr::V4(Ipv4Addr::UNSPECIFIED).into());
        TlsConnector::from(Arc::clone(tls)).connect(nobody, tcp).await
    };
    let opened = timeout(RESULT_DEADLINE, opened).await.context("no TLS session in time")?;
    opened.context("TLS failed")
}

impl Peer {
    /// Connects, and acknowledges the gateway's SETTINGS.
    pub(super) async fn connect(to: &Target, settings: &[u8]) -> anyhow::Result<Self> {
        let mut peer = Self::unconnected(to).await?;
        peer.write(raw::PREFACE).await?;
        peer.write(&raw::frame(raw::SETTINGS, 0, 0, settings)).await?;
        let is_settings =
            |frame: &Frame| frame.kind == raw::SETTINGS && frame.flags & raw::ACK == 0;
        peer.limits = Limits::read(&peer.until(is_settings).await?.payload);
        peer.write(&raw::frame(raw::SETTINGS, raw::ACK, 0, &[])).await?;
        Ok(peer)
    }

    pub(super) async fn unconnected(to: &Target) -> anyhow::Result<Self> {
        let stream = session(to.address, &to.tls).await?;
        let decoder = loona_hpack::Decoder::new();
        Ok(Self { stream, limits: Limits::DEFAULT, is_answered: false, decoder })
    }

    /// Brings stream 1 into a state.
    pub(super) async fn bring(&mut self, to: &Target, state: State) -> anyhow::Result<()> {
        let end = raw::frame(raw::DATA, raw::END_STREAM, 1, &[]);
        match state {
            State::Unconnected | State::Idle => {}
            State::Open => self.open(to, 1).await?,
            State::HalfClosedRemote => {
                self.open(to, 1).await?;
                self.write(&raw::frame(raw::DATA, 0, 1, &[KEEP])).await?;
                self.until(|frame| frame.kind == raw::DATA).await?;
                self.write(&end).await?;
            }
            State::HalfClosedLocal | State::Ended => {
                self.open(to, 1).await?;
                self.write(&raw::frame(raw::DATA, 0, 1, &[END])).await?;
                self.until(|frame| frame.kind == raw::DATA && frame.flags & raw::END_STREAM != 0)
                    .await?;
                if state == State::Ended {
                    self.write(&end).await?;
                    self.is_answered = true;
                }
            }
            State::Reset => {
                self.open(to, 1).await?;
                self.write(&raw::frame(raw::RST_STREAM, 0, 1, &[0, 0, 0, 8])).await?;
            }
            State::ResetByGateway => {
                let malformed = [METHOD, to.names.authority(), (":path", b"/".as_slice())];
                self.write(&raw::headers(1, &malformed)).await?;
                self.until(|frame| frame.kind == raw::RST_STREAM).await?;
            }
            State::Rejected => {
                self.write(&raw::headers(1, &to.names.rejected())).await?;
                self.until(|frame| frame.kind == raw::HEADERS).await?;
                self.is_answered = true;
            }
        }
        Ok(())
    }

    /// Opens a tunnel, and waits for its answer.
    pub(super) async fn open(&mut self, to: &Target, stream: u32) -> anyhow::Result<()> {
        self.write(&raw::headers(stream, &to.names.connect())).await?;
        let answer = self.until(|frame| frame.kind == raw::HEADERS).await?;
        let status = self.status(&answer)?;
        ensure!(status == 200, "CONNECT to {}: status {status}", to.names.echo);
        Ok(())
    }

    pub(super) async fn write(&mut self, bytes: &[u8]) -> anyhow::Result<()> {
        let written = async {
            self.stream.write_all(bytes).await?;
            self.stream.flush().await
        };
        let written = timeout(RESULT_DEADLINE, written).await;
        written.context("the gateway stopped reading")?.context("the connection ended")
    }

    /// Writes to a connection that the gateway may have ended.
    pub(super) async fn try_write(&mut self, bytes: &[u8]) {
        // Its result is read afterwards.
        let _ = self.write(bytes).await;
    }

    /// Returns the next frame; none at the end of the connection.
    pub(super) async fn next(&mut self) -> anyhow::Result<Option<Frame>> {
        let next = timeout(RESULT_DEADLINE, raw::read_frame(&mut self.stream)).await;
        next.with_context(|| format!("no frame in {RESULT_DEADLINE:?}"))
    }

    /// Returns the next frame of a kind.
    pub(super) async fn until(
        &mut self,
        is_wanted: impl Fn(&Frame) -> bool,
    ) -> anyhow::Result<Frame> {
        loop {
            let frame = self.next().await?.context("the connection ended")?;
            if is_wanted(&frame) {
                return Ok(frame);
            }
            if let (raw::GOAWAY, &[_, _, _, _, a, b, c, d, ..]) = (frame.kind, &*frame.payload) {
                let code = h2::Reason::from(u32::from_be_bytes([a, b, c, d]));
                bail!("GOAWAY {code}");
            }
        }
    }

    pub(super) fn status(&mut self, answer: &Frame) -> anyhow::Result<u16> {
        let fields = self.decoder.decode(&answer.payload);
        let fields = fields.map_err(|error| anyhow::anyhow!("invalid header block: {error:?}"))?;
        let (name, value) = fields.first().context("a header block without fields")?;
        ensure!(name == b":status", "a first field other than :status");
        Ok(str::from_utf8(value)?.parse()?)
    }

    /// Returns the result of the frames sent before. Two rounds of PING follow them, as answers to
    /// PING may overtake the results of earlier frames.
    pub(super) async fn outcome(&mut self, expected: &[Outcome]) -> anyhow::Result<Outcome> {
        let is_later = |outcome: &Outcome| matches!(outcome, Outcome::Status(_) | Outcome::Data(_));
        let waits = expected.iter().any(is_later);
        let mut received = Vec::new();
        let ping = |round| raw::frame(raw::PING, 0, 0, &[0xfe, 0, 0, 0, 0, 0, 0, round]);
        self.try_write(&ping(1)).await;
        loop {
            let Ok(next) = timeout(RESULT_DEADLINE, raw::read_frame(&mut self.stream)).await else {
                return Ok(Outcome::Data(received.into()));
            };
            let Some(frame) = next else {
                return Ok(Outcome::Closed);
            };
            match (frame.kind, frame.payload.as_slice()) {
                (raw::GOAWAY, &[_, _, _, _, a, b, c, d, ..]) if [a, b, c, d] != [0; 4] => {
                    return Ok(Outcome::Connection(u32::from_be_bytes([a, b, c, d])));
                }
                // A server may reset a stream after its complete answer (RFC 9113 section 8.1).
                (raw::RST_STREAM, [0, 0, 0, 0]) if self.is_answered => {}
                (raw::RST_STREAM, &[a, b, c, d]) => {
                    return Ok(Outcome::Stream(u32::from_be_bytes([a, b, c, d])));
                }
                (raw::HEADERS, _) => return Ok(Outcome::Status(self.status(&frame)?)),
                (raw::DATA, payload) if frame.stream == 1 && !payload.is_empty() => {
                    received.extend(payload);
                    if expected.contains(&Outcome::Data(received.clone().into())) {
                        return Ok(Outcome::Data(received.into()));
                    }
                }
                (raw::PING, &[0xfe, .., 1]) => self.try_write(&ping(2)).await,
                (raw::PING, &[0xfe, .., 2]) if received.is_empty() && !waits => {
                    return Ok(Outcome::Ignored);
                }
                (raw::PING, &[0xfe, .., 2]) if !waits => return Ok(Outcome::Data(received.into())),
                _ => {}
            }
        }
    }

    /// Returns the two directions, for a flood that is sent while answers are read.
    pub(super) fn split(self) -> (ReadHalf<TlsStream<TcpStream>>, WriteHalf<TlsStream<TcpStream>>) {
        tokio::io::split(self.stream)
    }

    pub(super) fn socket(&self) -> &TcpStream {
        self.stream.get_ref().0
    }
}
