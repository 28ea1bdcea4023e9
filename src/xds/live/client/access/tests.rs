//! Credentials of users in all their forms, and connections by TLS.

use rcgen::SanType;
use rustls::ServerConfig;
use rustls::server::WebPkiClientVerifier;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpListener;
use tokio::task::JoinSet;
use tokio_rustls::TlsAcceptor;

use super::*;
use crate::tools::dev::{Authority, Leaf};
use crate::xds::live::client::describe;

/// Change of a configuration.
type Change = fn(&mut Config);

fn access(user: Json) -> Access {
    let mut config = Config::new(Uri::from_static("http://127.0.0.1:1"));
    config.auth_info = serde_json::from_value(user).expect("a user");
    Access::new(config)
}

/// Returns the current authorization, or the error.
async fn authorized(access: &Access) -> String {
    match access.credentials().await {
        Ok(known) => match &known.authorization {
            Some(value) => {
                assert!(value.is_sensitive());
                value.to_str().expect("a text").to_owned()
            }
            None => String::new(),
        },
        Err(error) => format!("{error:#}"),
    }
}

#[tokio::test]
async fn credentials_have_the_order_and_the_forms_of_kubectl() {
    let other = "the auth provider `gcp` has no `id-token`; use `exec`";
    let missing = "/nowhere/token: No such file or directory (os error 2)";
    let refused = "the credentials have characters that no header may have";
    for (user, wanted) in [
        (json!({}), ""),
        (json!({"token": " t\n", "tokenFile": "/nowhere/token"}), "Bearer t"),
        (json!({"username": "u", "password": "p", "token": "t"}), "Basic dTpw"),
        (json!({"username": "u", "token": "t"}), "Bearer t"),
        (json!({"tokenFile": "/nowhere/token", "exec": {"command": "true"}}), missing),
        (json!({"auth-provider": {"name": "oidc", "config": {"id-token": "i"}}}), "Bearer i"),
        (json!({"auth-provider": {"name": "gcp"}, "token": "t"}), other),
        (json!({"token": "a\nb"}), refused),
        (json!({"exec": {}}), "`exec` has no `command`"),
    ] {
        assert_eq!(authorized(&access(user.clone())).await, wanted, "{user}");
    }
}

#[tokio::test]
async fn a_token_file_is_read_again_and_its_last_content_stays() {
    let file = tempfile::NamedTempFile::new().expect("a file");
    let access = access(json!({"tokenFile": file.path()}));
    let write = |token: &str| fs::write(file.path(), token).expect("a write");
    write("a\n");
    assert_eq!(authorized(&access).await, "Bearer a");
    write("b");
    assert_eq!(authorized(&access).await, "Bearer a");
    let expire = async || access.credentials.lock().await.until = Some(SystemTime::UNIX_EPOCH);
    expire().await;
    assert_eq!(authorized(&access).await, "Bearer b");
    file.close().expect("a removal");
    expire().await;
    assert_eq!(authorized(&access).await, "Bearer b");
    let until = access.credentials.lock().await.until.expect("a time");
    assert!(until > SystemTime::now());
}

#[tokio::test]
async fn a_token_that_the_server_refuses_is_read_again_for_the_next_request() {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a listener");
    let port = listener.local_addr().expect("an address").port();
    let mut tasks = JoinSet::new();
    tasks.spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            let mut head = Vec::new();
            while !head.ends_with(b"\r\n\r\n") {
                head.push(stream.read_u8().await.expect("a head"));
            }
            let is_new = String::from_utf8_lossy(&head).contains("Bearer new\r\n");
            let status = if is_new { "200 OK" } else { "401 Unauthorized" };
            let answer =
                format!("HTTP/1.1 {status}\r\nconnection: close\r\ncontent-length: 2\r\n\r\n{{}}");
            stream.write_all(answer.as_bytes()).await.expect("a write");
        }
    });
    let file = tempfile::NamedTempFile::new().expect("a file");
    fs::write(file.path(), "old").expect("a write");
    let mut config = Config::new(format!("http://127.0.0.1:{port}").parse().expect("a URI"));
    config.auth_info = serde_json::from_value(json!({"tokenFile": file.path()})).expect("a user");
    let client = client(config).await.expect("a client");
    let asked = async || {
        let request = Request::get("/version").body(Vec::new()).expect("a request");
        client.request_text(request).await
    };
    assert!(asked().await.is_err(), "the old token");
    fs::write(file.path(), "new").expect("a write");
    assert_eq!(asked().await.expect("an answer"), "{}");
}

/// Returns a user with a plugin of this shell script, whose runs a file counts.
fn plugin(script: &str, file: &Path) -> Json {
    let script = format!("printf x >>\"$FILE\"; count=$(wc -c <\"$FILE\"); {script}");
    json!({"exec": {
        "apiVersion": "client.authentication.k8s.io/v1", "command": "sh", "args": ["-c", script],
        "env": [{"name": "FILE", "value": file}], "interactiveMode": "Never",
    }})
}

#[tokio::test]
async fn a_plugin_runs_again_before_its_credentials_expire() {
    let folder = tempfile::tempdir().expect("a folder");
    for (file, end, wanted) in [
        ("none", "", "Bearer t1"),
        ("late", ", expirationTimestamp: '2999-01-01T00:00:00Z'", "Bearer t1"),
        ("past", ", expirationTimestamp: '2020-01-01T00:00:00Z'", "Bearer t3"),
    ] {
        let script = format!("echo \"{{status: {{token: t$count{end}}}}}\"");
        let access = access(plugin(&script, &folder.path().join(file)));
        for _ in 0..2 {
            authorized(&access).await;
        }
        assert_eq!(authorized(&access).await, wanted, "{file}");
    }
}

#[tokio::test]
async fn a_plugin_receives_the_form_of_its_answer_which_may_be_yaml() {
    let folder = tempfile::tempdir().expect("a folder");
    let (count, info) = (folder.path().join("count"), folder.path().join("info"));
    let script = format!(
        "printf %s \"$KUBERNETES_EXEC_INFO\" >{}; printf 'status:\\n  token: 12e4\\n  \
         clientCertificateData: chain\\n  clientKeyData: key\\n'",
        info.display()
    );
    let access = access(plugin(&script, &count));
    assert_eq!(authorized(&access).await, "Bearer 12e4");
    let identity = access.credentials.lock().await.identity.clone();
    assert_eq!(identity, Some((b"chain".to_vec(), b"key".to_vec())));
    let received: Json = serde_json::from_slice(&fs::read(info).expect("a file")).expect("JSON");
    let version = "client.authentication.k8s.io/v1";
    let spec = json!({"interactive": false});
    assert_eq!(received, json!({"kind": "ExecCredential", "apiVersion": version, "spec": spec}));
}

#[tokio::test]
async fn a_plugin_that_fails_is_named_without_its_answer() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("count");
    let incomplete =
        "the answer of the plugin has neither a `token` nor a certificate with its key";
    for (script, wanted) in [
        ("echo s3cret; echo no login >&2; exit 3", "sh: exit status: 3 no login"),
        ("echo s3cret", incomplete),
        ("echo '{s3cret'", "sh: the answer is not JSON"),
        ("echo '{status: {clientKeyData: s3cret}}'", incomplete),
        (
            "echo '{status: {token: s3cret, expirationTimestamp: soon}}'",
            "`expirationTimestamp` soon: timestamp format is invalid",
        ),
    ] {
        assert_eq!(authorized(&access(plugin(script, &file))).await, wanted, "{script}");
    }
    let user = json!({"exec": {"command": "/nowhere/plugin"}});
    let wanted = "/nowhere/plugin: No such file or directory (os error 2)";
    assert_eq!(authorized(&access(user)).await, wanted);
}

/// Starts an API server that asks for a certificate under `root`, and answers each request with
/// the head of it. Returns its port.
async fn server(root: &Authority, own: &Leaf, tasks: &mut JoinSet<()>) -> u16 {
    let provider = Arc::new(aws_lc_rs::default_provider());
    let roots = Arc::new(parse_roots(root.root_pem().as_bytes()).expect("a root"));
    let verifier = WebPkiClientVerifier::builder_with_provider(roots, Arc::clone(&provider));
    let config = ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .expect("versions")
        .with_client_cert_verifier(verifier.build().expect("a verifier"));
    let chain = CertificateDer::pem_slice_iter(own.chain_pem.as_bytes());
    let chain = chain.collect::<Result<_, _>>().expect("a chain");
    let key = PrivateKeyDer::from_pem_slice(own.key_pem.as_bytes()).expect("a key");
    let config = config.with_single_cert(chain, key).expect("a configuration");
    let tls = TlsAcceptor::from(Arc::new(config));
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a listener");
    let port = listener.local_addr().expect("an address").port();
    tasks.spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            let Ok(mut stream) = tls.accept(stream).await else { continue };
            let mut head = Vec::new();
            while !head.ends_with(b"\r\n\r\n") {
                head.push(stream.read_u8().await.expect("a head"));
            }
            let length = head.len();
            let answer = "HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length:";
            let answer = format!("{answer} {length}\r\n\r\n");
            stream.write_all(answer.as_bytes()).await.expect("a write");
            stream.write_all(&head).await.expect("a write");
        }
    });
    port
}

#[tokio::test]
async fn a_connection_verifies_the_server_and_shows_the_certificate_of_the_user() {
    let folder = tempfile::tempdir().expect("a folder");
    let [root, other] = [(); 2].map(|()| Authority::new().expect("a root"));
    let leaf = |name: &str| {
        let name = SanType::DnsName(name.try_into().expect("a name"));
        root.leaf_with(|params| params.subject_alt_names.push(name)).expect("a leaf")
    };
    let (own, user) = (leaf("api.test"), leaf("user.test"));
    let mut tasks = JoinSet::new();
    let port = server(&root, &own, &mut tasks).await;
    let file = folder.path().join("root.pem");
    fs::write(&file, root.root_pem()).expect("a file");
    let config = |change: &dyn Fn(&mut Config)| {
        let uri = format!("https://127.0.0.1:{port}/base").parse().expect("a URI");
        let mut config = Config::new(uri);
        config.root_cert_file = Some(file.clone());
        config.tls_server_name = Some("api.test".to_owned());
        config.auth_info = serde_json::from_value(json!({
            "token": "t", "as": "me", "client-key-data": BASE64_STANDARD.encode(&user.key_pem),
            "client-certificate-data": BASE64_STANDARD.encode(&user.chain_pem),
        }))
        .expect("a user");
        change(&mut config);
        config
    };
    let asked = async |client: &Client| {
        let request = Request::get("/version").body(Vec::new()).expect("a request");
        client.request_text(request).await.map_err(|error| describe(&error))
    };
    let sound = client(config(&|_| ())).await.expect("a client");
    let head = asked(&sound).await.expect("an answer");
    assert!(head.starts_with("GET /base/version HTTP/1.1\r\n"), "{head}");
    for header in ["authorization: Bearer t\r\n", "impersonate-user: me\r\n"] {
        assert!(head.contains(header), "{head}");
    }

    let names: [Change; 2] = [
        |config| config.tls_server_name = Some("b.test".to_owned()),
        |config| config.tls_server_name = None,
    ];
    for change in names {
        let client = client(config(&change)).await.expect("a client");
        let error = asked(&client).await.expect_err("the server has another name");
        assert!(error.contains("not valid for name"), "{error}");
    }
    let unverified = client(config(&|config| config.auth_info = AuthInfo::default())).await;
    assert!(asked(&unverified.expect("a client")).await.is_err(), "a user without a certificate");

    fs::write(&file, other.root_pem()).expect("a file");
    let error = asked(&sound).await.expect_err("the server has another root");
    assert!(error.contains("UnknownIssuer"), "{error}");
    let careless = client(config(&|config| config.accept_invalid_certs = true)).await;
    asked(&careless.expect("a client")).await.expect("an answer");
    fs::write(&file, root.root_pem()).expect("a file");
    asked(&sound).await.expect("an answer");
}

#[tokio::test]
async fn what_cannot_be_used_is_an_error_at_the_start() {
    let with = |change: Change| {
        let mut config = Config::new(Uri::from_static("https://127.0.0.1:1"));
        config.root_cert = Some(vec![]);
        change(&mut config);
        client(config)
    };
    let cases: [(Change, &str); 4] = [
        (|_| (), "there are no roots for the API server"),
        (|config| config.root_cert = Some(vec![vec![1]]), "unusable root for the API server"),
        (|config| config.proxy_url = Some(Uri::from_static("http://u:p@proxy:1")), "as proxy are"),
        (
            |config| {
                config.accept_invalid_certs = true;
                config.auth_info.client_certificate_data = Some("YQ==".to_owned());
            },
            "only one is given",
        ),
    ];
    for (change, wanted) in cases {
        let error = with(change).await.err().expect("an error").to_string();
        assert!(error.contains(wanted) && !error.contains("u:p"), "{error}");
    }
}
