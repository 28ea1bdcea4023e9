//! HTTP client of an API server, with the roots and the credentials of its configuration.
//!
//! The one that `kube` makes of a configuration reads every form that credentials ever had, by an
//! engine of JSONPath and a second YAML parser: a megabyte of code.
//!
//! Certificates are read for each connection, and a token file each minute. A plugin runs again a
//! minute before its credentials expire.

#[cfg(test)]
mod tests;

use std::fs;
use std::path::Path;
use std::process::Stdio;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use anyhow::{Context as _, anyhow, bail, ensure};
use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use http::header::AUTHORIZATION;
use http::uri::Scheme;
use http::{HeaderValue, Request, StatusCode, Uri};
use hyper_rustls::{
    DefaultServerNameResolver, FixedServerNameResolver, HttpsConnector, MaybeHttpsStream,
    ResolveServerName,
};
use hyper_timeout::TimeoutConnector;
use hyper_util::client::legacy::Client as HttpClient;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::{TokioExecutor, TokioIo};
use kube::client::{Body, ConfigExt as _};
use kube::config::{AuthInfo, ExecConfig, ExecInteractiveMode};
use kube::{Client, Config};
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::aws_lc_rs;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use rustls::{ClientConfig, DigitallySignedStruct, RootCertStore, SignatureScheme};
use secrecy::ExposeSecret as _;
use serde_json::{Value as Json, json};
use tokio::net::TcpStream;
use tokio::process::Command;
use tokio::sync::{Mutex, MutexGuard};
use tokio::task::spawn_blocking;
use tokio::time::timeout;
use tower::{BoxError, Layer as _, ServiceExt as _, service_fn};

use super::kubeconfig;
use crate::grpc::channel::{parse_roots, system_roots};
use crate::yaml::Document;

/// Time for which the content of a token file is used.
const TOKEN_TIME: Duration = Duration::from_secs(50);

/// Time before the end of a plugin's credentials at which it runs again.
const MARGIN: Duration = Duration::from_secs(60);

/// Time for a plugin to answer.
const PLUGIN_DEADLINE: Duration = Duration::from_secs(30);

/// API server, and the credentials of this process for it.
struct Access {
    config: Config,
    credentials: Mutex<Credentials>,
}

/// Credentials, and the time at which they are read again.
#[derive(Default)]
struct Credentials {
    authorization: Option<HeaderValue>,
    /// Certificate chain and private key of a plugin.
    identity: Option<Identity>,
    until: Option<SystemTime>,
}

/// Certificate chain and private key, both in PEM.
type Identity = (Vec<u8>, Vec<u8>);

/// Returns a client of an API server. Reads certificates and credentials once, so that those that
/// cannot be used are an error now.
pub(super) async fn client(config: Config) -> anyhow::Result<Client> {
    if let Some(proxy) = &config.proxy_url {
        let host = proxy.host().unwrap_or_default();
        bail!("proxies such as {host} are not supported; unset `proxy-url` and HTTPS_PROXY");
    }
    let (address, headers) = (config.base_uri_layer(), config.extra_headers_layer()?);
    let namespace = config.default_namespace.clone();
    let timeouts = (config.connect_timeout, config.read_timeout, config.write_timeout);
    let access = Arc::new(Access::new(config));
    Arc::clone(&access).tls().await?;
    let mut tcp = HttpConnector::new();
    tcp.enforce_http(false);
    let dialled = Arc::clone(&access);
    let dialler = service_fn(move |uri| Arc::clone(&dialled).dial(tcp.clone(), uri));
    let mut connector = TimeoutConnector::new(dialler);
    connector.set_connect_timeout(timeouts.0);
    connector.set_read_timeout(timeouts.1);
    connector.set_write_timeout(timeouts.2);
    let http = HttpClient::builder(TokioExecutor::new()).build::<_, Body>(connector);
    let send = service_fn(move |mut request: Request<Body>| {
        let (access, http) = (Arc::clone(&access), http.clone());
        async move {
            let sent = access.credentials().await?.authorization.clone();
            if let Some(value) = &sent {
                request.headers_mut().insert(AUTHORIZATION, value.clone());
            }
            let response = http.request(request).await?;
            if response.status() == StatusCode::UNAUTHORIZED {
                access.refused(sent).await;
            }
            Ok::<_, BoxError>(response)
        }
    });
    // Without retries of its own, which would hide 429 and 503 for minutes: watches and writes are
    // tried again by their callers, which name the cause.
    let service = headers.layer(send);
    Ok(Client::new(address.layer(service), namespace))
}

impl Access {
    /// Creates an access whose credentials are read for its first use.
    fn new(config: Config) -> Self {
        let unread = Credentials { until: Some(SystemTime::UNIX_EPOCH), ..Credentials::default() };
        Self { config, credentials: Mutex::new(unread) }
    }

    /// Has credentials read again that the API server refuses, as client-go does.
    async fn refused(&self, sent: Option<HeaderValue>) {
        let mut known = self.credentials.lock().await;
        if known.until.is_some() && known.authorization == sent {
            known.until = Some(SystemTime::UNIX_EPOCH);
        }
    }

    /// Opens a connection.
    async fn dial(
        self: Arc<Self>,
        tcp: HttpConnector,
        uri: Uri,
    ) -> Result<MaybeHttpsStream<TokioIo<TcpStream>>, BoxError> {
        let name = self.config.tls_server_name.clone();
        let Some(tls) = self.tls().await? else {
            return Ok(MaybeHttpsStream::Http(tcp.oneshot(uri).await?));
        };
        let name: Arc<dyn ResolveServerName + Send + Sync> = match name {
            Some(name) => Arc::new(FixedServerNameResolver::new(ServerName::try_from(name)?)),
            None => Arc::new(DefaultServerNameResolver::default()),
        };
        HttpsConnector::new(tcp, tls, true, name).oneshot(uri).await
    }

    /// Returns the configuration of TLS for a connection; none without TLS.
    async fn tls(self: Arc<Self>) -> anyhow::Result<Option<ClientConfig>> {
        let identity = self.credentials().await?.identity.clone();
        if self.config.cluster_url.scheme() != Some(&Scheme::HTTPS) {
            return Ok(None);
        }
        spawn_blocking(move || self.read_tls(identity)).await?.map(Some)
    }

    fn read_tls(&self, identity: Option<Identity>) -> anyhow::Result<ClientConfig> {
        let roots = self.roots()?;
        let is_verified = !self.config.accept_invalid_certs;
        ensure!(!is_verified || !roots.is_empty(), "there are no roots for the API server");
        let builder = ClientConfig::builder_with_provider(aws_lc_rs::default_provider().into())
            .with_safe_default_protocol_versions()?
            .with_root_certificates(roots);
        let identity = match identity {
            None => read_identity(&self.config.auth_info)?,
            of_plugin => of_plugin,
        };
        let mut tls = match identity {
            None => builder.with_no_client_auth(),
            Some((chain, key)) => {
                let chain = CertificateDer::pem_slice_iter(&chain).collect::<Result<_, _>>();
                let chain = chain.map_err(|error| anyhow!("client certificate: {error}"))?;
                let key = PrivateKeyDer::from_pem_slice(&key);
                let key = key.map_err(|error| anyhow!("client key: {error}"))?;
                builder.with_client_auth_cert(chain, key)?
            }
        };
        if !is_verified {
            tls.dangerous().set_certificate_verifier(Arc::new(Unverified));
        }
        Ok(tls)
    }

    /// Returns the roots: those of the file, if it can be read, as it was at the start if not.
    fn roots(&self) -> anyhow::Result<RootCertStore> {
        let file = self.config.root_cert_file.as_ref().and_then(|file| fs::read(file).ok());
        if let Some(roots) = file.and_then(|pem| parse_roots(&pem).ok()) {
            return Ok(roots);
        }
        let Some(certificates) = &self.config.root_cert else { return Ok(system_roots()) };
        let mut roots = RootCertStore::empty();
        for certificate in certificates {
            let added = roots.add(certificate.as_slice().into());
            added.map_err(|error| anyhow!("unusable root for the API server: {error}"))?;
        }
        Ok(roots)
    }

    /// Returns the credentials, which are read again if it is time. The last content of a token
    /// file is used if the file is gone, as by client-go: it may be removed on purpose.
    async fn credentials(&self) -> anyhow::Result<MutexGuard<'_, Credentials>> {
        let mut known = self.credentials.lock().await;
        if known.until.is_some_and(|until| until <= SystemTime::now()) {
            let user = &self.config.auth_info;
            let has_file = user.token_file.is_some();
            match Credentials::read(user).await {
                Ok(read) => *known = read,
                Err(_) if has_file && known.authorization.is_some() => {
                    known.until = Some(SystemTime::now() + TOKEN_TIME);
                }
                Err(error) => return Err(error),
            }
        }
        Ok(known)
    }
}

impl Credentials {
    /// Reads the credentials of a user, in the order of client-go.
    async fn read(user: &AuthInfo) -> anyhow::Result<Self> {
        let mut read = Self::default();
        let mut token = None;
        if let Some(provider) = &user.auth_provider {
            let found = provider.config.get("id-token").cloned();
            token = Some(found.with_context(|| {
                format!("the auth provider `{}` has no `id-token`; use `exec`", provider.name)
            })?);
        } else if let (Some(name), Some(password)) = (&user.username, &user.password) {
            let pair = BASE64_STANDARD.encode(format!("{name}:{}", password.expose_secret()));
            read.authorization = Some(authorization("Basic", &pair)?);
        } else if let Some(own) = &user.token {
            token = Some(own.expose_secret().to_owned());
        } else if let Some(file) = &user.token_file {
            token = Some(fs::read_to_string(file).map_err(|error| anyhow!("{file}: {error}"))?);
            read.until = Some(SystemTime::now() + TOKEN_TIME);
        } else if let Some(plugin) = &user.exec {
            let status = run(plugin).await?;
            let text = |key: &str| status[key].as_str();
            let pem = |key| text(key).map(|pem| pem.as_bytes().to_owned());
            token = text("token").map(str::to_owned);
            read.identity = pem("clientCertificateData").zip(pem("clientKeyData"));
            ensure!(
                token.is_some() || read.identity.is_some(),
                "the answer of the plugin has neither a `token` nor a certificate with its key"
            );
            read.until = text("expirationTimestamp").map(expiry).transpose()?;
        }
        if let Some(token) = token {
            read.authorization = Some(authorization("Bearer", token.trim())?);
        }
        Ok(read)
    }
}

fn authorization(scheme: &str, credentials: &str) -> anyhow::Result<HeaderValue> {
    let mut value = HeaderValue::try_from(format!("{scheme} {credentials}"))
        .map_err(|_| anyhow!("the credentials have characters that no header may have"))?;
    value.set_sensitive(true);
    Ok(value)
}

/// Returns the time before the end of credentials at which they are read again.
fn expiry(end: &str) -> anyhow::Result<SystemTime> {
    let time = humantime::parse_rfc3339(end);
    let time = time.map_err(|error| anyhow!("`expirationTimestamp` {end}: {error}"))?;
    Ok(time - MARGIN)
}

/// Runs a plugin, and returns the `status` of its answer, which errors do not quote.
async fn run(plugin: &ExecConfig) -> anyhow::Result<Json> {
    let command = plugin.command.as_deref().context("`exec` has no `command`")?;
    let is_interactive = plugin.interactive_mode != Some(ExecInteractiveMode::Never);
    let mut spec = json!({"interactive": is_interactive});
    if plugin.provide_cluster_info {
        spec["cluster"] = json!(plugin.cluster);
    }
    let version = &plugin.api_version;
    let info = json!({"kind": "ExecCredential", "apiVersion": version, "spec": spec});
    let variables = plugin.env.iter().flatten();
    let variables = variables.filter_map(|one| Some((one.get("name")?, one.get("value")?)));
    let mut child = Command::new(command);
    child.args(plugin.args.iter().flatten()).envs(variables);
    child.env("KUBERNETES_EXEC_INFO", info.to_string());
    if is_interactive {
        child.stdin(Stdio::inherit()).stderr(Stdio::inherit());
    }
    let output = timeout(PLUGIN_DEADLINE, child.kill_on_drop(true).output()).await;
    let output =
        output.map_err(|_| anyhow!("{command} has not ended within {PLUGIN_DEADLINE:?}"))?;
    let output = output.map_err(|error| anyhow!("{command}: {error}"))?;
    let errors = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{command}: {} {}", output.status, errors.trim());
    // YAML, as client-go reads it. JSON is a part of it.
    let answer = String::from_utf8_lossy(&output.stdout);
    let document = Document::parse(Path::new(command), &answer);
    let document = document.map_err(|_| anyhow!("{command}: the answer is not JSON"))?;
    let mut answer = kubeconfig::json(&document, &document.root);
    Ok(answer.get_mut("status").map(Json::take).unwrap_or_default())
}

/// Reads the client certificate of a user, and its key.
fn read_identity(user: &AuthInfo) -> anyhow::Result<Option<Identity>> {
    let chain = pem(user.client_certificate_data.as_deref(), user.client_certificate.as_deref())?;
    let key = user.client_key_data.as_ref().map(|key| key.expose_secret());
    match (chain, pem(key, user.client_key.as_deref())?) {
        (None, None) => Ok(None),
        (Some(chain), Some(key)) => Ok(Some((chain, key))),
        _ => bail!("of `client-certificate` and `client-key`, only one is given"),
    }
}

/// Returns PEM that is inline, in Base64, or in a file.
fn pem(inline: Option<&str>, file: Option<&str>) -> anyhow::Result<Option<Vec<u8>>> {
    let read = match (inline, file) {
        (Some(inline), _) => BASE64_STANDARD.decode(inline).map_err(anyhow::Error::from),
        (None, Some(file)) => fs::read(file).map_err(|error| anyhow!("{file}: {error}")),
        (None, None) => return Ok(None),
    };
    read.map(Some)
}

/// Verifier for `insecure-skip-tls-verify`.
#[derive(Debug)]
struct Unverified;

impl ServerCertVerifier for Unverified {
    fn verify_server_cert(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        Ok(HandshakeSignatureValid::assertion())
    }

    fn verify_tls13_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        Ok(HandshakeSignatureValid::assertion())
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        aws_lc_rs::default_provider().signature_verification_algorithms.supported_schemes()
    }
}
