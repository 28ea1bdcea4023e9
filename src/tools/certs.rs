//! `strait certs`: development root and the certificates of the examples, as files.
//!
//! The set is made in memory before the first file is written, so that invalid arguments do not
//! leave a partial set.

use std::collections::BTreeSet;
use std::fs::{self, Permissions};
use std::io::{self, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, bail, ensure};
use spiffe::TrustDomain;

use crate::labels::printed;
use crate::tools::dev::{Authority, Leaf};

/// Write a development root, and SPIFFE certificates signed below it, to a folder
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// Folder to write to; created if it is missing
    dir: PathBuf,

    /// Name of a cluster; repeatable. Each gets a gateway, the first an endpoint, others a client
    #[arg(
        long = "cluster",
        value_name = "NAME",
        default_values_t = [String::from("east"), String::from("west")]
    )]
    clusters: Vec<String>,

    /// Replace the files of an earlier run; certificates of the old root are no longer trusted
    #[arg(long)]
    force: bool,
}

/// Makes the certificates, writes them, and lists the files on standard output.
pub fn run(args: &Args) -> anyhow::Result<()> {
    write_certificates(args, &mut io::stdout().lock())
}

fn write_certificates(args: &Args, out: &mut impl Write) -> anyhow::Result<()> {
    let files = files(&args.clusters)?;
    if !args.force {
        refuse_to_overwrite(&args.dir, &files)?;
    }
    fs::create_dir_all(&args.dir)
        .with_context(|| format!("cannot make the folder {}", args.dir.display()))?;
    write_files(&args.dir, &files)?;
    // Print after writing: a reader that closes the pipe must not cause a partial set.
    Ok(printed(print_summary(args, &files, out))?)
}

/// Writes the set for the clusters to a folder. `IdentityMaterial::load` reads the files.
pub(super) fn write_set(dir: &Path, clusters: &[String]) -> anyhow::Result<()> {
    write_files(dir, &files(clusters)?)
}

fn write_files(dir: &Path, files: &[File]) -> anyhow::Result<()> {
    for file in files {
        let path = dir.join(&file.name);
        write_file(dir, file).with_context(|| format!("cannot write {}", path.display()))?;
    }
    Ok(())
}

fn print_summary(args: &Args, files: &[File], out: &mut impl Write) -> io::Result<()> {
    for file in files {
        writeln!(out, "{:<24}  {}", args.dir.join(&file.name).display(), file.about)?;
    }
    // The gateway resolves relative paths from the folder of its strait.yaml, which is unknown
    // here.
    let dir = fs::canonicalize(&args.dir)?;
    let dir = dir.display();
    writeln!(out, "\nnext, use them in the strait.yaml of a gateway:")?;
    writeln!(
        out,
        "  identity: {{kind: files, chain: {dir}/gateway.crt, key: {dir}/gateway.key, \
         roots: {dir}/root.crt}}"
    )?;
    writeln!(
        out,
        "then run `strait check -c strait.yaml`; deploy/local/strait.yaml of the repository \
         expects the folder `certs` beside `deploy`"
    )
}

/// File of the set, before it is written.
struct File {
    name: String,
    content: String,
    mode: u32,
    about: String,
}

fn files(clusters: &[String]) -> anyhow::Result<Vec<File>> {
    let authority = Authority::new()?;
    let mut files = vec![File {
        name: "root.crt".to_owned(),
        content: authority.root_pem(),
        mode: CERTIFICATE_MODE,
        about: "root of all certificates".to_owned(),
    }];
    for (cluster, leaves) in leaves(clusters)? {
        let issuer = authority.intermediate(&cluster)?;
        for (name, id) in leaves {
            let Leaf { chain_pem, key_pem } = issuer.leaf(&id)?;
            files.push(File {
                name: format!("{name}.crt"),
                content: chain_pem,
                mode: CERTIFICATE_MODE,
                about: id,
            });
            files.push(File {
                name: format!("{name}.key"),
                content: key_pem,
                mode: KEY_MODE,
                about: format!("its key, mode {KEY_MODE:04o}"),
            });
        }
    }
    Ok(files)
}

/// Checks that the name of a cluster fits identities and file names, of which it becomes a part.
fn check_cluster(cluster: &str) -> anyhow::Result<()> {
    let domain = format!("{cluster}.local");
    let fits = TrustDomain::new(&domain).is_ok_and(|parsed| parsed.as_str() == domain);
    ensure!(
        fits && !cluster.is_empty(),
        "invalid cluster name `{cluster}`, `{domain}` is not a trust domain; use lower-case \
         letters, digits, `-`, `_` and `.`"
    );
    Ok(())
}

/// File names without extension, each with its SPIFFE ID.
type Leaves = Vec<(String, String)>;

fn leaves(clusters: &[String]) -> anyhow::Result<Vec<(String, Leaves)>> {
    let mut seen = BTreeSet::new();
    let mut set = Vec::new();
    for (index, cluster) in clusters.iter().enumerate() {
        check_cluster(cluster)?;
        if !seen.insert(cluster) {
            bail!("cluster `{cluster}` is named twice; name each cluster once");
        }
        let leaf = |name: &str, path: &str| {
            let id = format!("spiffe://{cluster}.local/{path}");
            (name.to_owned(), id)
        };
        let mut leaves = Leaves::new();
        if index == 0 {
            leaves.push(leaf("gateway", GATEWAY));
            leaves.push(leaf("endpoint", "ns/app/sa/echo"));
        } else {
            leaves.push(leaf(&format!("gateway-{cluster}"), GATEWAY));
        }
        // A single cluster gets a client too, so that its gateway can be tried.
        match index {
            0 if clusters.len() > 1 => {}
            0 | 1 => leaves.push(leaf("client", CLIENT)),
            _ => leaves.push(leaf(&format!("client-{cluster}"), CLIENT)),
        }
        set.push((cluster.clone(), leaves));
    }
    let untrusted_id = format!("spiffe://stranger.example/{CLIENT}");
    let leaves = vec![("stranger".to_owned(), untrusted_id)];
    set.push(("stranger".to_owned(), leaves));
    Ok(set)
}

fn refuse_to_overwrite(dir: &Path, files: &[File]) -> anyhow::Result<()> {
    let present: Vec<&str> = files
        .iter()
        .filter(|file| dir.join(&file.name).symlink_metadata().is_ok())
        .map(|file| file.name.as_str())
        .collect();
    ensure!(
        present.is_empty(),
        "{} already contains {}; add --force to replace the whole set, or use another folder",
        dir.display(),
        present.join(", ")
    );
    Ok(())
}

/// Writes a temporary file beside the target and renames it. A gateway that watches the folder
/// never reads a partial file, and others can never read a key.
fn write_file(dir: &Path, file: &File) -> io::Result<()> {
    let mut temporary =
        tempfile::Builder::new().permissions(Permissions::from_mode(file.mode)).tempfile_in(dir)?;
    temporary.write_all(file.content.as_bytes())?;
    temporary.persist(dir.join(&file.name))?;
    Ok(())
}

const GATEWAY: &str = "ns/istio-system/sa/eastwest";
const CLIENT: &str = "ns/shop/sa/checkout";
const CERTIFICATE_MODE: u32 = 0o644;
const KEY_MODE: u32 = 0o600;

const EXAMPLES: &str = "Examples:
  strait certs certs                      clusters east and west
  strait certs --force certs              the same again, with a new root
  strait certs --cluster a --cluster b --cluster c /tmp/certs

Cluster NAME stands for the trust domain NAME.local. Writes root.crt, and .crt and .key of
gateway and endpoint (first cluster), gateway-NAME (all others), client (second), client-NAME
(further ones), and stranger: same root, and a trust domain that no example trusts. The root's own
key is not kept.";

#[cfg(test)]
mod tests {
    use super::*;

    fn args(dir: &Path, clusters: &[&str], force: bool) -> Args {
        let clusters = clusters.iter().map(|&cluster| cluster.to_owned()).collect();
        Args { dir: dir.to_owned(), clusters, force }
    }

    fn names(dir: &Path) -> Vec<String> {
        let entries = fs::read_dir(dir).unwrap();
        let mut names: Vec<String> =
            entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    #[test]
    fn the_set_for_two_clusters_is_written_and_reported() {
        let temporary = tempfile::tempdir().unwrap();
        let dir = temporary.path().join("new/certs");
        let mut out = Vec::new();
        write_certificates(&args(&dir, &["east", "west"], false), &mut out).unwrap();

        let expected = [
            "client.crt",
            "client.key",
            "endpoint.crt",
            "endpoint.key",
            "gateway-west.crt",
            "gateway-west.key",
            "gateway.crt",
            "gateway.key",
            "root.crt",
            "stranger.crt",
            "stranger.key",
        ];
        assert_eq!(names(&dir), expected);
        let out = String::from_utf8(out).unwrap();
        for name in expected {
            assert!(out.contains(dir.join(name).to_str().unwrap()), "{name} is not in\n{out}");
        }
        assert!(out.contains("spiffe://west.local/ns/shop/sa/checkout"), "{out}");
        assert!(out.contains("strait check -c"), "{out}");
    }

    #[test]
    fn keys_are_for_their_owner_alone() {
        let dir = tempfile::tempdir().unwrap();
        write_certificates(&args(dir.path(), &["east", "west"], false), &mut Vec::new()).unwrap();
        for name in names(dir.path()).iter().filter(|name| name.ends_with(".key")) {
            let mode = fs::metadata(dir.path().join(name)).unwrap().permissions().mode();
            assert_eq!(mode & 0o777, 0o600, "{name}");
        }
    }

    #[test]
    fn an_earlier_set_is_kept_unless_forced() {
        let dir = tempfile::tempdir().unwrap();
        let set = args(dir.path(), &["east", "west"], false);
        write_certificates(&set, &mut Vec::new()).unwrap();
        let root = || fs::read_to_string(dir.path().join("root.crt")).unwrap();
        let before = root();

        let refusal = write_certificates(&set, &mut Vec::new()).unwrap_err().to_string();
        assert!(refusal.contains("root.crt") && refusal.contains("--force"), "{refusal}");
        assert_eq!(root(), before);

        write_certificates(&Args { force: true, ..set }, &mut Vec::new()).unwrap();
        assert_ne!(root(), before);
    }

    #[test]
    fn one_cluster_has_a_client_and_a_third_one_has_its_own() {
        let stems = |clusters: &[&str]| -> Vec<String> {
            let clusters: Vec<String> = clusters.iter().map(|&name| name.to_owned()).collect();
            let set = leaves(&clusters).unwrap();
            set.into_iter().flat_map(|(_, leaves)| leaves).map(|(name, _)| name).collect()
        };
        assert_eq!(stems(&["a"]), ["gateway", "endpoint", "client", "stranger"]);
        let three =
            ["gateway", "endpoint", "gateway-b", "client", "gateway-c", "client-c", "stranger"];
        assert_eq!(stems(&["a", "b", "c"]), three);
    }

    #[test]
    fn a_name_that_cannot_be_a_cluster_leaves_no_file() {
        let dir = tempfile::tempdir().unwrap();
        for (cluster, word) in [("a/b", "a/b"), ("", "``"), ("West", "West"), ("east", "twice")] {
            let set = args(dir.path(), &["east", cluster], false);
            let refusal = write_certificates(&set, &mut Vec::new()).unwrap_err().to_string();
            assert!(refusal.contains(word), "{refusal}");
        }
        assert_eq!(names(dir.path()), [""; 0]);
    }

    #[test]
    fn every_certificate_chains_to_the_root_file_with_the_keys_beside_it() {
        use rustls::pki_types::pem::PemObject;
        use rustls::pki_types::{CertificateDer, PrivateKeyDer};

        let dir = tempfile::tempdir().unwrap();
        write_certificates(&args(dir.path(), &["east", "west"], false), &mut Vec::new()).unwrap();
        let mut roots = rustls::RootCertStore::empty();
        roots.add(CertificateDer::from_pem_file(dir.path().join("root.crt")).unwrap()).unwrap();
        for name in ["gateway", "endpoint", "client", "stranger"] {
            let path = dir.path().join(name);
            let chain: Vec<_> = CertificateDer::pem_file_iter(path.with_extension("crt"))
                .unwrap()
                .collect::<Result<_, _>>()
                .unwrap();
            let key = PrivateKeyDer::from_pem_file(path.with_extension("key")).unwrap();
            let provider = rustls::crypto::aws_lc_rs::default_provider();
            // Building the configuration checks that the key matches the certificate.
            rustls::ClientConfig::builder_with_provider(provider.into())
                .with_safe_default_protocol_versions()
                .unwrap()
                .with_root_certificates(roots.clone())
                .with_client_auth_cert(chain, key)
                .unwrap();
        }
    }
}
